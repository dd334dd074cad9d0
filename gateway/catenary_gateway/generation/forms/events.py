"""Events of an answer that is read piece by piece: content, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """A piece of the text that is meant for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call: its tool is known, and its arguments follow."""

    index: int
    """Number of calls that began before it in the same answer."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A piece of the arguments of a call, which are a JSON object as text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallComplete:
    """The end of a call whose arguments are a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The end of a call whose arguments are no JSON object, or are cut off."""

    index: int
    written: str
    """The whole call as the model wrote it."""


AnswerEvent = ContentPiece | ReasoningPiece | CallStart | ArgumentsPiece | CallComplete | CallBroken


class AnswerParser(Protocol):
    """Reader of one answer's text, which it turns into events piece by piece."""

    def push(self, text: str) -> Sequence[AnswerEvent]:
        """Returns what has become certain with the next piece of the answer."""
        ...

    def end(self) -> Sequence[AnswerEvent]:
        """Returns the rest, after the last piece."""
        ...


class ContentParser:
    """Reader of an answer that is all content."""

    def push(self, text: str) -> Sequence[AnswerEvent]:
        """Returns the piece as content."""
        return [ContentPiece(text)] if text else []

    def end(self) -> Sequence[AnswerEvent]:
        """Returns nothing, because nothing was held back."""
        return []
