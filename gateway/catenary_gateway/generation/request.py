"""A generation as the plane behind the doors sees it: token ids and numbers, no protocol."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from catenary_gateway.catalog import Model
from catenary_gateway.generation.text.chat_template import Message
from catenary_gateway.generation.text.text_codec import TextCodec
from catenary_protos.catenary.v1 import common_pb2
from catenary_services.domain.sampling import SamplingParameters

CHAT = "chat"
TEXT_COMPLETION = "text_completion"
"""Operations by their names in OpenTelemetry's conventions for generative AI."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, for the model's chat template."""

    messages: Sequence[Message]
    variables: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to go on with."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerationTerms:
    """What the caller asks beside the text."""

    deadline_ns: int | None = None
    """The whole answer within so long; None: the model's default."""
    time_to_first_token_ns: int | None = None
    time_per_output_token_ns: int | None = None
    """Service level objectives, which the scheduler places it by; None: the model's, if any."""
    priority: int = 0
    timed: bool = False
    """Say where the time of every token went."""
    generated: Sequence[int] = ()
    """Tokens of the answer that the caller has from another gateway; it goes on behind them."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request whose prompt is tokens and was checked against the model."""

    model: Model
    id: str
    operation: str
    prompt: array[int]
    """At least one token."""
    sampling: SamplingParameters
    """Resolved: `max_tokens` and `seed` have values."""
    codec: TextCodec
    terms: GenerationTerms


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the time of one token went."""

    token_id: int
    since_previous_ns: int
    """From the token before, or from the request's arrival."""
    hops: Sequence[common_pb2.HopTiming]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a door is given at a time: everything since the piece before."""

    text: str
    token_ids: tuple[int, ...]
    """Tokens whose text may still be held back are here already."""
    finish_reason: str
    """"stop" or "length" in the last piece, else empty."""
    timings: tuple[StepTiming, ...] = ()
    """If asked for."""
    generated_before: int = 0
    """Tokens of the answer before these."""
