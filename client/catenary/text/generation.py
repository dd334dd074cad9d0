"""Text generation as data: options, answers, and their messages. Pure."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from catenary.errors import InvalidInputError
from catenary.records import record_of
from catenary.rpc.calls import RpcCall
from catenary.text.logprobs import TokenLogprobs, logprobs_of
from catenary_protos.catenary.v1 import generation_pb2

Messages = str | Sequence[Mapping[str, str]]
"""One user message, or a conversation of `{"role": ..., "content": ...}`."""
Prompt = str | Sequence[int]
"""Text as it is, without a chat template, or token ids."""


class GenerationOptions(TypedDict, total=False):
    """The options of a generation; the server decides on those left out.

    Attributes:
        max_tokens: The longest answer; as long as the model's context allows if left out.
        min_tokens: Number of tokens before which the text does not end.
        temperature: 0, the default, always takes the most likely token.
        top_p: Only the most likely tokens whose probabilities add up to this are taken.
        top_k: Number of the most likely tokens from which one is taken.
        repetition_penalty: Above 1 it makes tokens of prompt and answer less likely.
        presence_penalty: Subtracted from the logit of every token in the answer.
        frequency_penalty: Subtracted once for each time a token is in the answer.
        min_p: Tokens less likely than this share of the likeliest one's probability are left out.
        logit_bias: Token ids and the values added to their logits, -100 to 100.
        grammar: What the answer must match: rules in Lark, or
            `{"grammars": [{"json_schema": {...}}]}` as JSON.
        stop: The answer ends before this text, or the first of these.
        seed: Equal seeds give equal answers.
        ignore_eos: Whether the answer goes on after an end-of-text token.
        logprobs: Every token comes with its log probability, and those of so many of the likeliest
            ones, up to 20; without it none does.
        prompt_logprobs: The same of the tokens of the prompt, all but the first.
        stop_token_ids: The answer ends with the first of these tokens.
        allowed_token_ids: The only tokens that are generated.
        bad_words: Texts that are not generated.
        include_stop_str_in_output: Whether the text ends with the stop text that ended it.
        skip_special_tokens: Whether special tokens are left out of the text, as they are by
            default.
        timings: Whether every piece says where the time of its tokens went.
        time_to_first_token_slo_ms: Milliseconds until the first token should be there. The request
            is placed by this and the next; without them by those of the model, if it has any.
        time_per_output_token_slo_ms: Mean milliseconds that each further token may take.
        priority: Higher goes first; at most what the API key allows.
        timeout_s: Seconds until the whole answer must be there; travels as the gRPC deadline.
        request_id: An id that the result repeats and `trace` knows; drawn if left out.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_p: float
    logit_bias: Mapping[int, float]
    grammar: str
    stop: str | Sequence[str]
    seed: int
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    stop_token_ids: Sequence[int]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    timings: bool
    time_to_first_token_slo_ms: float
    time_per_output_token_slo_ms: float
    priority: int
    timeout_s: float
    request_id: str


_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "seed",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "grammar",
)
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
_KNOWN = frozenset(GenerationOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of one request; the prompt's may include some that were cached before."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenHop:
    """The work of one agent for one token; durations in nanoseconds.

    Attributes:
        agent_id: The agent.
        first_block: It ran blocks `[first_block, last_block)`.
        last_block: See above.
        transfer_ns: Time on the way to the agent; 0 where clocks cannot be compared.
        wait_ns: Time until it began to compute.
        compute_ns: Time to compute, for all sessions of the step.
        send_ns: Time until the result was handed on.
    """

    agent_id: str
    first_block: int
    last_block: int
    transfer_ns: int
    wait_ns: int
    compute_ns: int
    send_ns: int


@dataclass(frozen=True, slots=True)
class TokenTiming:
    """The time of one token, hop by hop; the gateway measured `since_previous_ns`."""

    token_id: int
    since_previous_ns: int
    hops: tuple[TokenHop, ...]


@dataclass(frozen=True, slots=True)
class ObjectivesReport:
    """Objectives of an answer, with predicted and measured times, in nanoseconds.

    Attributes:
        time_to_first_token_slo_ns: Objective of the request or of its model; 0 for none.
        time_per_output_token_slo_ns: Objective for the mean of each token behind the first; 0 for
            none.
        time_to_first_token_ns: Time that the gateway measured.
        time_per_output_token_ns: Mean that the gateway measured; 0 for an answer of one token.
        predicted_time_to_first_token_ns: Time that the scheduler expected at placement; 0 for none.
        predicted_time_per_output_token_ns: Mean that the scheduler expected at placement; 0 for
            none.
        met: Whether every objective was met.
    """

    time_to_first_token_slo_ns: int
    time_per_output_token_slo_ns: int
    time_to_first_token_ns: int
    time_per_output_token_ns: int
    predicted_time_to_first_token_ns: int
    predicted_time_per_output_token_ns: int
    met: bool


@dataclass(frozen=True, slots=True)
class ChainChange:
    """A change of an answer from one chain to another, as the gateway saw it.

    Attributes:
        how: "kv" or "tokens" for a live move, by what travelled; "restart" after a loss.
        generated_tokens: Number of tokens that were generated before.
        after_ns: Time from the request's arrival to the first token of the new chain.
        stall_ns: Time from the last token of the old chain to the first of the new one.
        from_agents: Agents of the old chain, in the order of their blocks.
        to_agents: Agents of the new chain, in the order of their blocks.
    """

    how: str
    generated_tokens: int
    after_ns: int
    stall_ns: int
    from_agents: tuple[str, ...]
    to_agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A piece of an answer; the last one has a finish reason and the usage.

    Attributes:
        text: Whole characters; may be empty.
        token_ids: The tokens that came with it.
        finish_reason: "stop", "length" or "cancelled"; empty until the last piece.
        usage: Numbers of tokens of the whole request, in the last piece.
        timings: Timings of its tokens, if asked for.
        objectives: Objectives of the whole request, in the last piece.
        chain_changes: Changes of chain of the whole request, in the last piece.
        generated_before: In an answer that goes on at another gateway, tokens before this piece's.
        logprobs: Log probabilities of its tokens, if asked for.
        prompt_logprobs: Those of the prompt's tokens but the first, if asked for, in the first
            piece.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    usage: Usage | None = None
    timings: tuple[TokenTiming, ...] = ()
    objectives: ObjectivesReport | None = None
    chain_changes: tuple[ChainChange, ...] = ()
    generated_before: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A whole answer.

    Attributes:
        text: The text.
        token_ids: Its tokens.
        finish_reason: "stop", "length" or "cancelled".
        usage: Numbers of tokens of prompt and answer.
        id: Id of the request.
        timings: Timings of its tokens, if asked for.
        first_token_s: Seconds from the call to the first piece, as the client saw it.
        total_s: Seconds from the call to the end.
        objectives: Objectives as the gateway measured them; None before the end.
        chain_changes: Moves and restarts while it was generated, in order; known at the end.
        logprobs: Log probabilities of its tokens, if asked for.
        prompt_logprobs: Those of the prompt's tokens but the first, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    id: str
    timings: tuple[TokenTiming, ...]
    first_token_s: float
    total_s: float
    objectives: ObjectivesReport | None = None
    chain_changes: tuple[ChainChange, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class ResultBuilder:
    """Collects the pieces of one answer."""

    def __init__(self, request_id: str) -> None:
        """Begins to measure time, as the call is made."""
        self.id = request_id
        self.pieces: list[GeneratedText] = []
        self._started = self._first = self._last = time.monotonic()

    def add(self, piece: GeneratedText) -> None:
        """Adds the next piece."""
        self._last = time.monotonic()
        if not self.pieces:
            self._first = self._last
        self.pieces.append(piece)

    @property
    def result(self) -> GenerationResult:
        """The answer as far as it has arrived."""
        pieces = self.pieces
        tokens = tuple(token for piece in pieces for token in piece.token_ids)
        finish = pieces[-1] if pieces else GeneratedText("")
        return GenerationResult(
            text="".join(piece.text for piece in pieces),
            token_ids=tokens,
            finish_reason=finish.finish_reason,
            usage=finish.usage or Usage(0, len(tokens)),
            id=self.id,
            timings=tuple(timing for piece in pieces for timing in piece.timings),
            first_token_s=self._first - self._started,
            total_s=self._last - self._started,
            objectives=finish.objectives,
            chain_changes=finish.chain_changes,
            logprobs=tuple(each for piece in pieces for each in piece.logprobs),
            prompt_logprobs=tuple(each for piece in pieces for each in piece.prompt_logprobs),
        )


def chat_call(model: str, messages: Messages, options: GenerationOptions) -> RpcCall[GeneratedText]:
    """Returns the call for an answer to a conversation.

    Raises:
        InvalidInputError: An argument cannot be sent; the error names it.
    """
    call = _call(model, options)
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    for index, message in enumerate(given):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidInputError.at(field, "must have exactly role and content")
        if not all(isinstance(text, str) for text in message.values()):
            raise InvalidInputError.at(field, "role and content must be texts")
        call.request.messages.add(role=message["role"], content=message["content"])
    if not call.request.messages:
        raise InvalidInputError.at("messages", "is empty")
    return call


def prompt_call(model: str, prompt: Prompt, options: GenerationOptions) -> RpcCall[GeneratedText]:
    """Returns the call for the continuation of a prompt.

    Raises:
        InvalidInputError: An argument cannot be sent; the error names it.
    """
    call = _call(model, options)
    if len(prompt) == 0:
        raise InvalidInputError.at("prompt", "is empty")
    if isinstance(prompt, str):
        call.request.prompt = prompt
    else:
        _set(call.request.token_ids.extend, "prompt", [int(token) for token in prompt])
    return call


def _call(model: str, options: GenerationOptions) -> RpcCall[GeneratedText]:
    unknown = sorted(options.keys() - _KNOWN)
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}")
    if not model:
        raise InvalidInputError.at("model", "is empty")
    request = generation_pb2.GenerateRequest(
        model=model,
        id=options.get("request_id") or uuid.uuid4().hex,
        timings=options.get("timings", False),
    )
    for name in _SAMPLING:
        if name in options:
            value = options[name]  # type: ignore[literal-required]
            _set(lambda v, name=name: setattr(request.sampling, name, v), name, value)
    if "priority" in options:
        _set(lambda value: setattr(request, "priority", value), "priority", options["priority"])
    for token, bias in options.get("logit_bias", {}).items():
        pair = {"token_id": token, "bias": bias}
        _set(lambda each: request.sampling.logit_bias.add(**each), "logit_bias", pair)
    for name in _LISTS:
        if name in options:
            values = options[name]  # type: ignore[literal-required]
            _set(getattr(request.sampling, name).extend, name, values)
    stop = options.get("stop", ())
    _set(request.sampling.stop.extend, "stop", [stop] if isinstance(stop, str) else stop)
    for name in ("time_to_first_token_slo", "time_per_output_token_slo"):
        option = f"{name}_ms"
        if option in options:
            milliseconds: float = options[option]  # type: ignore[literal-required]
            if not 0 < milliseconds < 1e12:
                raise InvalidInputError.at(option, "must be a positive number")
            setattr(request, f"{name}_ns", max(1, round(milliseconds * 1e6)))
    timeout_s = options.get("timeout_s")
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidInputError.at("timeout_s", "must be positive")
    return RpcCall("generation", "Generate", request, piece_of, timeout_s)


def _set(put: Any, field: str, value: Any) -> None:
    try:
        put(value)
    except (TypeError, ValueError) as error:
        raise InvalidInputError.at(field, f"cannot be {value!r}: {error}") from error


def piece_of(message: generation_pb2.GenerateResponse) -> GeneratedText:
    """Returns one piece of an answer."""
    # By hand: there is one for every few tokens, and most have nothing but text and tokens.
    return GeneratedText(
        message.text,
        tuple(message.token_ids),
        message.finish_reason,
        record_of(Usage, message.usage) if message.HasField("usage") else None,
        tuple(record_of(TokenTiming, timing) for timing in message.timings),
        record_of(ObjectivesReport, message.objectives) if message.HasField("objectives") else None,
        tuple(record_of(ChainChange, change) for change in message.chain_changes),
        message.generated_before,
        tuple(map(logprobs_of, message.logprobs)),
        tuple(map(logprobs_of, message.prompt_logprobs)),
    )
