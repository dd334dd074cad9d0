"""Messages between a gateway and the process that runs a model's templates and tokenizer.

Each is a header and a MessagePack document. An order's header says how much processor time it may
take; an answer's says of which kind it is.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from catenary_gateway.generation.forms.tool_use import ToolDefinition
from catenary_gateway.generation.text.encoder_config import EncoderConfig
from catenary_services.domain.model import RECOGNISED

ORDER_HEADER = struct.Struct("<IQ")
"""Bytes of the order behind it, and microseconds of processor time for it."""
ANSWER_HEADER = struct.Struct("<IB")
"""Bytes of the answer behind it, and its `AnswerKind`."""


class AnswerKind(IntEnum):
    """The byte before an answer, which says how the order ended."""

    RESULT = 0
    REFUSAL = 1
    """The conversation or text is refused, in a `TextRefusal`."""
    FAILURE = 2
    """The model's files fail at it, as a text says; the process goes on."""
    END = 3
    """The process ends, for the `JailLimit` that is named."""


class TextFiles(msgspec.Struct, frozen=True):
    """The files of a model that concern texts, and the settings of their use: the first order."""

    tokenizer: bytes
    tokenizer_config: bytes | None = None
    template: bytes | None = None
    config: bytes | None = None
    tool_parser: str = RECOGNISED
    reasoning_parser: str = RECOGNISED
    special_from_content: bool = False
    """True to take special tokens out of what clients write in conversations."""

    @property
    def nbytes(self) -> int:
        """Bytes of all the files."""
        contents = (self.tokenizer, self.tokenizer_config, self.template, self.config)
        return sum(len(each or b"") for each in contents)


class TextDescription(msgspec.Struct, frozen=True):
    """Everything of a model's files that a gateway itself needs: the answer to the first order."""

    tokens: bytes
    """The tokens in the order of their ids, each a byte of one in front of its UTF-8; an id without
    a token has neither."""
    starts: bytes
    """Offsets at which each of them begins, and the last one ends: 32-bit integers."""
    added: dict[int, str]
    """Tokens that stand for themselves in texts."""
    special: list[int]
    """Ids of the added tokens that are special."""
    decoder: str | None
    """The document of the tokenizer's decoder; None if it has none."""
    vocabulary_size: int
    longest_token: int
    """Characters of the longest token."""
    added_to_text: int
    """Number of special tokens that the tokenizer puts around a text."""
    added_to_pair: int
    chats: bool
    template: str
    """Source of the template of conversations with tools; empty if there is none."""
    shows_tools: bool
    encoder: EncoderConfig


class RenderOrder(msgspec.Struct, frozen=True, tag="render", array_like=True):
    """A conversation that becomes text, and the text's tokens."""

    messages: Sequence[dict[str, Any]]
    variables: dict[str, Any]
    tools: Sequence[ToolDefinition]
    add_generation_prompt: bool
    special_tokens: bool
    """Whether to add the tokens that the tokenizer puts around a text."""
    most_characters: int
    """A longer text is not encoded."""


class EncodeOrder(msgspec.Struct, frozen=True, tag="encode", array_like=True):
    """Texts that become tokens; special tokens are recognised in them."""

    texts: Sequence[str]
    special_tokens: bool


class RowsOrder(msgspec.Struct, frozen=True, tag="rows", array_like=True):
    """Rows of one text, or of a pair of texts, that become tokens, cut to the most there may be."""

    texts: Sequence[str]
    rows: Sequence[Sequence[int]]
    """Rows, each of which names its one text or two by their indices in `texts`."""
    most: int


TextOrder = RenderOrder | EncodeOrder | RowsOrder


class Rendering(msgspec.Struct, frozen=True, array_like=True):
    """A conversation as text and tokens: both empty if it is too long."""

    characters: int
    text: str
    ids: bytes
    """32-bit integers, as everywhere in answers."""


class Encodings(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of several texts or rows."""

    ids: list[bytes]
    type_ids: list[bytes]
    """The text of a pair that each token of a row is of; empty where all are of one."""


class TextRefusal(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a conversation or a text is refused."""

    field: str
    message: str


def packed(ids: Sequence[int]) -> bytes:
    """Returns ids as 32-bit integers."""
    return array("I", ids).tobytes()


def unpacked(content: bytes) -> array[int]:
    """Returns the ids in 32-bit integers.

    Raises:
        ValueError: There is a part of one.
    """
    ids = array("I")
    ids.frombytes(content)
    return ids
