"""Messages as the dataclasses that are named like them (pure)."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.message import Message

T = TypeVar("T")


def record_of(kind: Callable[..., T], message: Message, **others: object) -> T:
    """Returns a dataclass of what a message has under the names of its fields.

    Repeated fields become tuples, messages the dataclass that their field is of, absent ones None.

    Args:
        kind: The dataclass.
        message: Has every field that is not among `others`.
        others: Fields that are not as the message has them.
    """
    for name, inner in _inner(kind).items():
        if name in others:
            continue
        value = getattr(message, name)
        if isinstance(value, MutableSequence):
            value = tuple(record_of(inner, each) if inner else each for each in value)
        elif inner is not None:
            value = record_of(inner, value) if message.HasField(name) else None
        others[name] = value
    return kind(**others)


@cache
def _inner(kind: Callable[..., Any]) -> dict[str, Any]:
    """Returns the dataclass in the type of each field, None where there is none."""
    return {
        name: next(filter(is_dataclass, (hint, *get_args(hint))), None)
        for name, hint in get_type_hints(kind).items()
    }
