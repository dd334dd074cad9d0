"""A generation as the session plane sees it: token ids and numbers, independent of protocols."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from catenary_gateway.catalog import Model
from catenary_gateway.generation.forms.answer_syntax import AnswerSyntax
from catenary_gateway.generation.forms.conversations import Message
from catenary_gateway.generation.forms.tool_use import ToolUse
from catenary_gateway.generation.text.text_codec import TextCodec
from catenary_gateway.inference import LONGEST_BUDGET_NS, RequestArrival
from catenary_protos.catenary.v1 import common_pb2
from catenary_services.domain.logprobs import TokenLogprobs
from catenary_services.domain.sampling import SamplingParameters

CHAT = "chat"
TEXT_COMPLETION = "text_completion"
"""The name of the operation for prompts without a chat, from OpenTelemetry's conventions for
generative AI (as `CHAT`)."""
FIRST_TOKEN_NS = 300_000_000_000
"""Nanoseconds from arrival to the first token, if neither the model nor the request names an
objective."""
SILENCE_NS = 60_000_000_000
"""Nanoseconds without a further token after which an answer is given up. This is longer than the
recovery from any loss of an agent, with time in the queue after it."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt that is a conversation, which the model's chat template turns into text."""

    messages: Sequence[Message]
    variables: Mapping[str, object] = field(default_factory=dict)
    tools: ToolUse | None = None
    """The tools that the model may call; None if there are none."""
    parsed: bool = False
    """True if calls and reasoning are taken out of the answer, False if it stays one text."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt that is text, which the model continues."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that is token ids, used unchanged."""

    token_ids: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of a generation: time limits in nanoseconds, priority, and what is reported."""

    deadline_ns: int | None = None
    """Time for the whole answer; None: as long as tokens keep coming, up to an hour."""
    time_to_first_token_ns: int | None = None
    time_per_output_token_ns: int | None = None
    """Objective for the mean time per token after the first. The scheduler places generations by
    both objectives; None stands for the model's objective, if it has one."""
    priority: int = 0
    timed: bool = False
    """True to report the hop times of every token."""
    grammar_field: str = "grammar"
    """The field of the request that describes the grammar of the answer, for errors."""
    generated: Sequence[int] = ()
    """Tokens of the answer that the caller has received through another gateway; generation
    continues after them."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation request whose prompt is token ids and was checked against the model."""

    model: Model
    id: str
    operation: str
    prompt: array[int]
    """Ids of the prompt's tokens, one at least."""
    sampling: SamplingParameters
    """Sampling parameters in which `max_tokens` and `seed` have values."""
    codec: TextCodec
    options: GenerationOptions
    syntax: AnswerSyntax = field(default_factory=AnswerSyntax)
    """The forms of whatever the answer may have beside text."""
    choice: int = 0
    """Index among several answers to the prompt; the first is charged for the prompt."""

    @property
    def charged_prompt_tokens(self) -> int:
        """Number of prompt tokens that count against the key of the caller."""
        return 0 if self.choice else len(self.prompt)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Times of one generated token: the time since the previous one, and those of every hop."""

    token_id: int
    since_previous_ns: int
    """Nanoseconds since the previous token, or since the request's arrival for the first one."""
    hops: Sequence[common_pb2.HopTiming]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One generated token with its log probabilities, and its place in the answer's text."""

    logprobs: TokenLogprobs
    offset: int
    """Number of characters of the text in front of the token's."""
    is_text: bool
    """False for the token that ended the answer, unless it is to be part of the text."""


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A piece of an answer: everything that came since the piece before."""

    text: str
    token_ids: tuple[int, ...]
    """Ids of the new tokens. The text of the last ones may still be held back."""
    finish_reason: str
    """"stop" or "length" in the last piece, else empty."""
    timings: tuple[StepTiming, ...] = ()
    """Times of the new tokens, if the request asked for them."""
    generated_before: int = 0
    """Number of tokens of the answer before this piece."""
    scored: tuple[ScoredToken, ...] = ()
    """The new tokens with their log probabilities, if the request asked for them."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The time limits of one answer; points in time are on the monotonic clock.

    An answer of a client that named no time for the whole of it may take up to
    `LONGEST_BUDGET_NS`, as long as tokens keep coming.
    """

    whole_ns: int
    """Time at which the whole answer must be complete."""
    first_token_ns: int
    """Time at which the first token must have come."""
    silence_ns: int
    """Nanoseconds that may pass without a further token."""

    def due_ns(self, last_token_ns: int) -> int:
        """Returns the time at which the answer is given up if no further token comes.

        `last_token_ns` is 0 before the first token.
        """
        next_ns = last_token_ns + self.silence_ns if last_token_ns else self.first_token_ns
        return min(self.whole_ns, next_ns)

    def stage_at(self, now_ns: int, last_token_ns: int) -> str:
        """Returns a phrase that says which of the limits has passed."""
        if now_ns >= self.whole_ns:
            return "the deadline passed"
        if last_token_ns:
            return f"no token came for {self.silence_ns / 1e9:g} s"
        return "no first token came in time"


def limits_of(request: GenerationRequest, arrival: RequestArrival, silence_ns: int) -> AnswerLimits:
    """Returns the limits of a request.

    The time for the whole answer is what the client says, in the request or as the deadline of its
    call. The model's objective applies to the first token only.
    """
    said = [ns for ns in (request.options.deadline_ns, arrival.budget_ns) if ns is not None]
    whole_ns = min(*said, LONGEST_BUDGET_NS) if said else LONGEST_BUDGET_NS
    first_ns = max(request.model.default_slo_ns, request.options.time_to_first_token_ns or 0)
    begins_ns = arrival.monotonic_ns
    return AnswerLimits(begins_ns + whole_ns, begins_ns + (first_ns or FIRST_TOKEN_NS), silence_ns)
