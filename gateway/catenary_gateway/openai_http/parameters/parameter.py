"""A parameter in the body of a request, and functions that write rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class ParameterKind(Enum):
    """The kind of a parameter."""

    TAKEN = "taken"
    REFUSED = "refused"
    """Refused with status 400, because the answer would not be what was asked for."""
    IGNORED = "ignored"
    """Ignored because it changes nothing that a client could miss."""


CHATS = frozenset({"chats"})
COMPLETIONS = frozenset({"completions"})
BOTH = CHATS | COMPLETIONS
RESPONSES = frozenset({"responses"})
MESSAGES = frozenset({"messages"})
EMBEDDINGS = frozenset({"embeddings"})
SCORES = frozenset({"scores"})
RERANKING = frozenset({"reranking"})
ENCODERS = EMBEDDINGS | SCORES | RERANKING
TOKENS = frozenset({"tokens"})
ALL = BOTH | RESPONSES | MESSAGES | ENCODERS | TOKENS


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of some paths."""

    name: str
    paths: frozenset[str]
    """The paths on which it is treated so, by their names in this module."""
    kind: ParameterKind
    text: str
    """The range or meaning of one that is taken, else the reason why it is not."""
    harmless: Callable[[Any], bool] = lambda value: False
    """True for a value of a refused parameter that asks for nothing, as null does."""


def only(*values: object) -> Callable[[Any], bool]:
    """Returns what is true of these values alone."""

    def harmless(value: Any) -> bool:
        # The types must be equal: 0 may ask for something, and False does not.
        return any(type(value) is type(each) and value == each for each in values)

    return harmless


_NOTHING = only(False, [], {}, "")


def unless(*values: object) -> Callable[[Any], bool]:
    """Returns what is true of these values, and of those that ask for nothing anywhere."""
    own = only(*values)
    return lambda value: own(value) or _NOTHING(value)


def taken(paths: frozenset[str], **texts: str) -> Iterable[Parameter]:
    """Yields parameters that are taken, each with what is said about it."""
    return (Parameter(name, paths, ParameterKind.TAKEN, text) for name, text in texts.items())


def refused(
    paths: frozenset[str], names: str, text: str, harmless: Callable[[Any], bool] = _NOTHING
) -> Iterable[Parameter]:
    """Yields parameters that are refused for one reason."""
    return (
        Parameter(name, paths, ParameterKind.REFUSED, text, harmless) for name in names.split(", ")
    )


def ignored(paths: frozenset[str], names: str, text: str) -> Iterable[Parameter]:
    """Yields parameters that are ignored for one reason."""
    return (Parameter(name, paths, ParameterKind.IGNORED, text) for name in names.split(", "))
