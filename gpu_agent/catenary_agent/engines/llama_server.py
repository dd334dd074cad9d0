"""The protocol of llama.cpp's server, as xllamacpp has it: `/completion` with numbers of tokens.

Its sampler is its own: answers by temperature are as random as ours, but others. Repetition,
presence and frequency penalties count the prompt, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from catenary_agent.engines.missing_tokens import MissingTokens
from catenary_agent.engines.requests import (
    NOTHING_NEW,
    EngineBooking,
    EngineCapacity,
    EngineCommand,
    EngineRequest,
    EngineTokens,
    grammar_parts,
    visible_devices,
)
from catenary_services.domain.logprobs import LOWEST_LOGPROB, TokenLogprobs, unknown_logprobs
from catenary_services.errors import InvalidInput, PartitionLost

if TYPE_CHECKING:
    from catenary_agent.executors.device import Device

_SEEDS = (1 << 32) - 1
"""The largest seed but one stands for any."""
_FINISHES = {"eos": "stop", "word": "stop", "limit": "length"}
_WINDOW_TOKENS = 256
"""The room of a sequence is a multiple of this."""
_ALL_LAYERS = 9_999
_SAMPLERS = ["penalties", "temperature", "top_k", "top_p", "min_p"]
"""Our order: `catenary_agent.decoders.sampling.sampling` has the reasons."""
_GREEDY = ["penalties", "top_k"]
"""The likeliest token alone is left, so that nothing is computed of all others."""
_PARAMETER = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*){0,2}")
_LARK = "%llguidance {}\n"
"""The first line of a grammar that llguidance is to read."""
_SEPARATOR = re.compile(r'("(?:item|key)_separator": ")([,:]) \?"')
"""A separator of JSON with a space or without: its llguidance takes that for a text, newer ones for
a pattern."""
_OWN = frozenset(
    {
        "model",
        "model_alias",
        "hostnames",
        "port",
        "n_ctx",
        "n_parallel",
        "kv_unified",
        "cont_batching",
        "ctx_shift",
        "fit_params",
        "cache_ram_mib",
        "ui",
        "endpoint_slots",
        "endpoint_props",
        "endpoint_metrics",
        "slot_save_path",
        "api_keys",
        "n_predict",
        "offline",
        "reuse_port",
        "sleep_idle_seconds",
    }
)
"""The parameters that the agent decides."""

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Likely(msgspec.Struct):
    id: _Token
    logprob: float | None = None


class _Scored(msgspec.Struct):
    id: _Token
    logprob: float | None = None
    top_logprobs: list[_Likely] = []


class _Event(msgspec.Struct):
    """A line of an answer, or all of one that comes in one piece."""

    stop: bool
    content: str = ""
    tokens: list[_Token] = []
    tokens_predicted: _Number = 0
    stop_type: str = ""
    completion_probabilities: list[_Scored] = []


class _Settings(msgspec.Struct):
    n_ctx: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class _Properties(msgspec.Struct):
    total_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    default_generation_settings: _Settings


class LlamaServerProtocol:
    """The protocol of llama-server."""

    path = "/completion"
    health_path = "/health"
    capacity_path = "/props"

    def __init__(self, unsaid: MissingTokens, places: int = 0, *, is_unified: bool = False) -> None:
        """Finds tokens that are not said by `unsaid`.

        Args:
            unsaid: The vocabulary of the model.
            places: The number of sequences that it keeps; 0 if requests name no places.
            is_unified: Whether all sequences share one room for their caches; then their places
                do not matter.
        """
        self.places = 0 if is_unified else places
        self._unsaid = unsaid
        self._is_unified = is_unified

    def body(self, request: EngineRequest, *, whole: bool = False) -> dict[str, Any]:
        """Returns the JSON object that asks for tokens; see `EngineProtocol.body`."""
        asked = request.parameters
        _check(request)
        made: dict[str, Any] = {
            "prompt": list(request.token_ids),
            "n_predict": request.most_tokens,
            "stream": not whole,
            "return_tokens": True,
            "cache_prompt": request.reuses_prompt,
            "response_fields": ["content", "tokens", "stop", "stop_type", "tokens_predicted"],
            "ignore_eos": asked.ignore_eos,
            "samplers": _GREEDY if asked.greedy else _SAMPLERS,
            "temperature": 0.0 if asked.greedy else asked.temperature,
            "top_k": 1 if asked.greedy else asked.top_k,
            "top_p": asked.top_p,
            "min_p": asked.min_p,
            "repeat_penalty": asked.repetition_penalty,
            "repeat_last_n": len(request.token_ids) + request.most_tokens,
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "seed": request.seed % _SEEDS,
        }
        if asked.logprobs is not None:
            made["n_probs"] = max(1, asked.logprobs)
            made["response_fields"].append("completion_probabilities")
        if request.place is not None:
            made["id_slot"] = request.place
        bias = [[token, value] for token, value in asked.logit_bias]
        bias += [[only, False] for (only,) in asked.bad_token_ids]
        if bias:
            made["logit_bias"] = bias
        return made | _grammar(asked.grammar)

    def parser(self, request: EngineRequest) -> _LlamaAnswer:
        """Returns a parser for the answer to a request."""
        return _LlamaAnswer(self._unsaid, request.parameters.logprobs)

    def capacity(self, page: bytes) -> EngineCapacity:
        """Returns what `/props` says; see `EngineProtocol.capacity`."""
        try:
            said = msgspec.json.decode(page, type=_Properties)
        except msgspec.DecodeError as error:
            raise PartitionLost(f"llama-server does not say what it keeps: {error}") from None
        slots, each = said.total_slots, said.default_generation_settings.n_ctx
        return EngineCapacity(slots, each if self._is_unified else slots * each)


class _LlamaAnswer:
    """Reads the lines of one answer of llama-server."""

    def __init__(self, unsaid: MissingTokens, top: int | None) -> None:
        self._unsaid = unsaid
        self._top = top
        self._count = 0

    def take(self, line: bytes) -> EngineTokens:
        """Returns what a line adds; see `AnswerParser.take`."""
        text = line.removeprefix(b"data: ")
        if not text or text.startswith(b":"):
            return NOTHING_NEW
        try:
            event = msgspec.json.decode(text, type=_Event)
        except msgspec.DecodeError:
            raise PartitionLost(f"llama-server said {_shown(text)}") from None
        tokens = event.tokens
        missing = event.tokens_predicted - self._count - len(tokens)
        if missing < 0:
            raise PartitionLost(
                f"llama-server counts {event.tokens_predicted} tokens, and says more"
            )
        if missing and tokens:
            last, before = tokens[-1], self._count
            found = self._unsaid.before(event.content.encode(), last, missing)
            if found is None:
                raise PartitionLost(f"{missing} tokens behind the {before} before cannot be known")
            tokens, missing = [*found, *tokens], 0
        self._count += len(tokens)
        finish = ""
        if event.stop:
            finish = _FINISHES.get(event.stop_type, "")
            if not finish:
                raise PartitionLost(f"llama-server ended an answer by {event.stop_type[:40]!r}")
        unsaid = missing if finish else 0
        return EngineTokens(tokens, self._scored(tokens, event), finish, unsaid)

    def _scored(self, tokens: list[int], event: _Event) -> list[TokenLogprobs]:
        if self._top is None:
            return []
        known = {each.id: each for each in event.completion_probabilities}
        return [self._score(token, known.get(token)) for token in tokens]

    def _score(self, token: int, scored: _Scored | None) -> TokenLogprobs:
        if scored is None:
            return unknown_logprobs(token)
        top = [(each.id, _logprob(each.logprob)) for each in scored.top_logprobs]
        # Of a token that is none of the likeliest, no rank is said.
        rank = next((at for at, (each, _) in enumerate(top, 1) if each == token), len(top) + 1)
        return TokenLogprobs(token, _logprob(scored.logprob), rank, tuple(top[: self._top]))


def llama_server_command(
    weights: Path, booking: EngineBooking, device: Device, threads: int, arguments: Sequence[str]
) -> EngineCommand:
    """Returns how llama-server is started with the room that is booked.

    Args:
        weights: The GGUF file.
        booking: The room.
        device: The device to compute on.
        threads: Threads of the CPU.
        arguments: What the model's manifest adds: "name=value" of xllamacpp's `CommonParams`.

    Raises:
        InvalidInput: An argument is none, or decides what the agent decides.
    """
    each = booking.tokens if booking.is_shared else booking.session_tokens
    # Every sequence takes whole windows, of which it may leave most of the last one empty.
    each = -(-each // _WINDOW_TOKENS) * _WINDOW_TOKENS
    parameters: dict[str, Any] = {
        "model.path": str(weights),
        "hostnames": ["{socket}"],
        "n_parallel": booking.sessions,
        "n_ctx": each if booking.is_shared else booking.sessions * each,
        "kv_unified": booking.is_shared,
        "cpuparams.n_threads": max(1, threads),
        "cpuparams_batch.n_threads": max(1, threads),
        "n_gpu_layers": _ALL_LAYERS if device.kind == "cuda" else 0,
        "cont_batching": True,
        "ctx_shift": False,
        "fit_params": False,
        "cache_ram_mib": 0,
        "ui": False,
        "endpoint_props": False,
        "endpoint_slots": False,
        "offline": True,
        **_own_parameters(arguments),
    }
    return EngineCommand("llama_server", (json.dumps(parameters),), visible_devices(device))


def _own_parameters(arguments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in arguments:
        name, is_given, text = each.partition("=")
        name = name.strip()
        if not is_given or not _PARAMETER.fullmatch(name):
            raise InvalidInput("engine_arguments", f"{each[:80]!r} is not name=value")
        if name.partition(".")[0] in _OWN:
            raise InvalidInput("engine_arguments", f"{name} is decided by the agent")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if not isinstance(value, bool | int | float | str):
            raise InvalidInput("engine_arguments", f"{name} is no number, truth value or text")
        found[name] = value
    return found


def _check(request: EngineRequest) -> None:
    """Raises InvalidInput if llama-server cannot do what a request asks for."""
    asked = request.parameters
    lacks = {
        "min_tokens": request.least_tokens > 0,
        "allowed_token_ids": bool(asked.allowed_token_ids),
        "bad_words": any(len(each) > 1 for each in asked.bad_token_ids),
        "prompt_logprobs": asked.prompt_logprobs is not None,
    }
    for field, is_asked in lacks.items():
        if is_asked:
            raise InvalidInput(field, "llama-server, which serves this model, does not have it")


def _grammar(asked: str) -> dict[str, Any]:
    if not asked:
        return {}
    schema, lark = grammar_parts(asked)
    if schema is not None:
        return {"json_schema": schema}
    return {"grammar": _LARK + _SEPARATOR.sub(r'\1\2 "', lark)}


def _logprob(value: float | None) -> float:
    return LOWEST_LOGPROB if value is None else max(LOWEST_LOGPROB, value)


def _shown(text: bytes) -> str:
    """Returns the beginning of what cannot be read."""
    return f"something that cannot be read: {text[:120].decode(errors='replace')!r}"
