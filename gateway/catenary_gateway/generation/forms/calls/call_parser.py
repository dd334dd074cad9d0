"""The reader of answers in which a model may call tools, without the marks of any one model."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeGuard, TypeVar

from catenary_gateway.generation.forms.calls.json_text import JsonText, json_value
from catenary_gateway.generation.forms.events import (
    AnswerEvent,
    ArgumentsPiece,
    CallBroken,
    CallComplete,
    CallStart,
    ContentPiece,
)

T = TypeVar("T")
Reading = Generator[None, str, T]
"""A function that is sent one character at a time, and an empty text at the end of the answer."""

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset(("name", "type", "id", "function", *_ARGUMENTS))
"""Keys of objects that may be calls; others show at once that an object is none."""
_INVALID = object()
"""Stands where a JSON value should be."""


class CallParser(ABC):
    """Reader of an answer in which a model may call tools.

    It reads one character after another, so that pieces of any size give the same events. What
    may become a call is held back until it names a tool and its arguments begin; all that becomes
    none is content. White space around calls is nobody's.
    """

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        """Begins an answer.

        Args:
            names: Names of the tools that may be called; what names another one is content.
            new_id: Returns an id for the next call.
        """
        self._names = frozenset(names)
        self._new_id = new_id
        self._events: list[AnswerEvent] = []
        self._calls = 0
        self._char = ""
        """The next character; empty at the end of the answer."""
        self._taken: list[str] = []
        """Characters that may be part of a call, or turn out to be content."""
        self._gap: str | None = ""
        """White space at the beginning, or since a call; None once content follows."""
        self._reading = self._read_all()
        next(self._reading)

    def push(self, text: str) -> Sequence[AnswerEvent]:
        """Returns what has become certain with the next piece of the answer."""
        for char in text:
            self._reading.send(char)
        return self._certain()

    def end(self) -> Sequence[AnswerEvent]:
        """Returns the rest, after the last piece."""
        with suppress(StopIteration):
            self._reading.send("")
        self._release()
        if self._gap and not self._calls:
            self._events.append(ContentPiece(self._gap))
        return self._certain()

    @abstractmethod
    def _read_next(self) -> Reading[None]:
        """Reads one character of content, or whatever begins with the next character."""

    def _read_all(self) -> Reading[None]:
        self._char = yield
        while self._char:
            yield from self._read_next()

    def _take(self) -> Reading[None]:
        """Takes the next character aside."""
        self._taken.append(self._char)
        self._char = yield

    def _content(self) -> Reading[None]:
        """Reads one character of content, with what is taken aside before it."""
        self._taken.append(self._char)
        self._release()
        self._char = yield

    def _space(self) -> Reading[None]:
        while self._char.isspace():
            yield from self._take()

    def _literal(self, text: str) -> Reading[bool]:
        """Takes a text; returns False, and what is taken of it, if another one is there."""
        for char in text:
            if self._char != char:
                return False
            yield from self._take()
        return True

    def _release(self) -> None:
        """Makes content of all that is taken aside."""
        text = "".join(self._taken)
        self._taken.clear()
        if self._gap is not None:
            self._gap += text
            if not self._gap or self._gap.isspace():
                return
            text, self._gap = self._gap, None
        if text:
            self._events.append(ContentPiece(text))

    def _object(self) -> Reading[bool]:
        """Reads an object that may be a call: a name with arguments.

        Returns False if it is none; what was read of it is content then.
        """
        known: dict[str, Any] = {}
        yield from self._literal("{")
        while (key := (yield from self._key())) is not None:
            if key in _ARGUMENTS and "name" in known and self._char == "{":
                if not (yield from self._arguments(known["name"])):
                    return False
                yield from self._rest_of_object()
                return True
            if key not in _KEYS:
                break
            known[key] = value = yield from self._value()
            if value is _INVALID or (key == "name" and not self._is_tool(value)):
                break
            yield from self._space()
            if (yield from self._literal("}")):
                return self._whole_call(known)
            if not (yield from self._literal(",")):
                break
        return self._is_none()

    def _key(self) -> Reading[str | None]:
        """Reads the key of an object's next value; returns None if there is none."""
        yield from self._space()
        key = yield from self._value()
        yield from self._space()
        if not isinstance(key, str) or not (yield from self._literal(":")):
            return None
        yield from self._space()
        return key

    def _list(self) -> Reading[bool]:
        """Reads a list of calls; returns False if it has something else, which is content then."""
        yield from self._take()
        called = False
        while True:
            yield from self._space()
            if self._char == "{":
                called = True
                if not (yield from self._object()):
                    return False
            elif called and self._char == ",":
                yield from self._take()
            elif called and self._char == "]":
                yield from self._take()
                self._taken.clear()
                return True
            else:
                return self._is_none()

    def _arguments(self, name: str) -> Reading[bool]:
        """Reads the object of a call's arguments, in pieces; returns False if it is none."""
        index, before = self._begin(name)
        text = JsonText()
        while (written := text.take(self._char)) is not None:
            self._events.append(ArgumentsPiece(index, written))
            yield from self._take()
        if text.complete and text.value(_INVALID) is not _INVALID:
            self._complete(index)
            return True
        self._events.append(CallBroken(index, before + "".join(self._taken)))
        self._gap = None
        self._taken.clear()
        return False

    def _rest_of_object(self) -> Reading[None]:
        """Reads what follows the arguments of a call in its object.

        Models forget the last brace: then what is there instead is looked at by others.
        """
        yield from self._space()
        while (yield from self._literal(",")):
            for separator in (":", ""):
                yield from self._space()
                yield from self._value()
                yield from self._space()
                yield from self._literal(separator)
        if (yield from self._literal("}")):
            self._taken.clear()
        self._release()

    def _value(self) -> Reading[Any]:
        """Reads a JSON value and returns it; `_INVALID` if there is none."""
        text = JsonText()
        while text.take(self._char) is not None:
            yield from self._take()
        return text.value(_INVALID)

    def _whole_call(self, known: dict[str, Any]) -> bool:
        """Makes a call of an object that has ended, if it is one.

        Some models write arguments first, or as a text, or all of it below "function".
        """
        inner = known.get("function")
        known = inner if isinstance(inner, dict) else known
        arguments: object = next((known[key] for key in _ARGUMENTS if known.get(key)), {})
        if isinstance(arguments, str):
            arguments = json_value(arguments, _INVALID)
        name = known.get("name")
        if not self._is_tool(name) or not isinstance(arguments, dict):
            return self._is_none()
        index, _ = self._begin(name)
        self._events.append(ArgumentsPiece(index, json.dumps(arguments, ensure_ascii=False)))
        self._complete(index)
        return True

    def _is_tool(self, name: object) -> TypeGuard[str]:
        return isinstance(name, str) and name in self._names

    def _is_none(self) -> bool:
        """Makes content of what is no call."""
        self._release()
        return False

    def _begin(self, name: str) -> tuple[int, str]:
        """Begins a call; returns its index, and the white space before it."""
        index, before = self._calls, self._gap or ""
        self._calls += 1
        self._events.append(CallStart(index, self._new_id(), name))
        return index, before

    def _complete(self, index: int) -> None:
        self._events.append(CallComplete(index))
        self._taken.clear()
        self._gap = ""

    def _certain(self) -> Sequence[AnswerEvent]:
        """Returns the events since the last time; pieces of one text become one."""
        events, self._events = self._events, []
        joined: list[AnswerEvent] = []
        parts: list[str] = []
        for event, following in zip_longest(events, events[1:]):
            if not isinstance(event, ContentPiece | ArgumentsPiece):
                joined.append(event)
                continue
            parts.append(event.text)
            if _kind_of(event) != _kind_of(following):
                joined.append(replace(event, text="".join(parts)))
                parts.clear()
        return joined


def _kind_of(event: AnswerEvent | None) -> tuple[type[object], int]:
    return type(event), event.index if isinstance(event, ArgumentsPiece) else -1
