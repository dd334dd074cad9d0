"""One checker for each type of message, compiled from its rules when it is first needed.

A good message, as nearly every one is, is only read by `walk`, which scans its bytes
(`catenary_services.rules.walking`). Where that is not compiled, `passes`, which
`catenary_services.rules.compiling` writes, checks the parsed message. Both may doubt a good message
but never accept a bad one. A message that both doubt is examined field by field by `violation`,
which says what is wrong.

What gRPC reads is checked where its bytes are at hand. A bad message is read as an
`InvalidMessage`, which is returned, not raised, because gRPC would keep an exception of a parser to
itself. Whoever gets the message raises it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from catenary_services.errors import InvalidMessage
from catenary_services.rules.compiling import Passes, compiled
from catenary_services.rules.relations import RELATIONS, Relation, holds
from catenary_services.rules.sizing import has_few
from catenary_services.rules.vocabulary import (
    FLOATS,
    INTEGERS,
    TEXTS,
    FieldBounds,
    bounds_of,
    is_nested,
    lowest,
)
from catenary_services.rules.walking import walk_of

MOST_VALUES = 100_000
"""The most values in one message (`has_few`)."""
_COUNTED_FROM_BYTES = 512 * 1024
_SHOWN = 64
"""The number of characters of a wrong value that error messages repeat."""

M = TypeVar("M", bound=Message)
Parse = Callable[[bytes], Any]


class MessageChecker:
    """Checks messages of one type, and the messages inside them.

    Attributes:
        name: Name of the message type.
        walk: Returns True if the bytes of a message keep all rules, False if they may not. None
            where it is not compiled.
        passes: Returns True if a parsed message keeps all rules, False if it may not.
    """

    __slots__ = ("_fields", "_relations", "name", "passes", "walk")

    def __init__(self, descriptor: Descriptor) -> None:
        self.name = descriptor.name
        self._fields = [(field, bounds_of(field)) for field in descriptor.fields]
        self._relations: list[tuple[Relation, Callable[[Any], bool]]] = [
            (relation, holds(descriptor, relation))
            for relation in RELATIONS.get(descriptor.full_name, ())
        ]
        passes = [
            checker_of(f.message_type).passes if is_nested(f) else None for f, _ in self._fields
        ]
        self.passes: Passes = compiled(
            descriptor.name,
            list(zip(self._fields, passes, strict=True)),
            [is_true for _, is_true in self._relations],
        )
        self.walk = walk_of(descriptor)

    def offence(self, message: Any, data: bytes | None = None) -> InvalidMessage | None:
        """Returns the error of a message that breaks a rule; None if it keeps all of them.

        Args:
            message: The parsed message.
            data: The bytes it was parsed from, if they are at hand: checking them is cheaper.
        """
        if data is not None and self.walk is not None and self.walk(data):
            return None
        found = None if self.passes(message) else self.violation(message)
        return None if found is None else InvalidMessage(*found)

    def violation(self, message: Any) -> tuple[str, str, str] | None:
        """Returns the type, the field and what is wrong with it; None if nothing is."""
        for field, bounds in self._fields:
            found = self._violation_of(message, field, bounds)
            if found is not None:
                return found
        for relation, is_true in self._relations:
            if not is_true(message):
                return self.name, relation.field, relation.why
        return None

    def _violation_of(
        self, message: Any, field: FieldDescriptor, bounds: FieldBounds
    ) -> tuple[str, str, str] | None:
        if field.has_presence and not message.HasField(field.name):
            return (self.name, field.name, "is missing") if bounds.required else None
        value = getattr(message, field.name)
        why: str | None = None
        if field.is_repeated:
            why = _violation_of_items(field, bounds, value)
        elif not is_nested(field):
            why = _violation_of_value(field, bounds, value)
        if why is not None or not is_nested(field):
            return None if why is None else (self.name, field.name, why)
        checker = checker_of(field.message_type)
        violations = map(checker.violation, value if field.is_repeated else (value,))
        return next((found for found in violations if found is not None), None)


@lru_cache(maxsize=None)  # noqa: UP033 - one for each type of message there is
def checker_of(descriptor: Descriptor) -> MessageChecker:
    return MessageChecker(descriptor)


def check(message: Message) -> None:
    """Checks that a message keeps its rules.

    Raises:
        InvalidMessage: It breaks one; the error names message and field.
    """
    offence = checker_of(message.DESCRIPTOR).offence(message)
    if offence is not None:
        raise offence


def parsed(kind: type[M], data: bytes, *, counted: bool = False) -> M:
    """Returns the message in bytes that a peer sent.

    Args:
        kind: The type of the message.
        data: Its bytes.
        counted: Whether to count the values of the message, too, before they are made.

    Raises:
        InvalidMessage: The bytes are no message of this type, or it breaks a rule.
    """
    descriptor: Any = kind.DESCRIPTOR
    crowd = too_many(descriptor, data) if counted else None
    if crowd is not None:
        raise crowd
    try:
        message = kind.FromString(data)
    except DecodeError:
        raise InvalidMessage(descriptor.name, "", "cannot be read") from None
    offence = checker_of(descriptor).offence(message, data)
    if offence is not None:
        raise offence
    return message


def _violation_of_items(field: FieldDescriptor, bounds: FieldBounds, values: Any) -> str | None:
    if bounds.max_items is not None and len(values) > bounds.max_items:
        return f"has {len(values)} items; {bounds.max_items} are allowed"
    if not values or is_nested(field):
        return None
    if field.type in INTEGERS:
        suspects: Iterator[Any] = iter((max(values), min(values)))
    else:
        suspects = iter(values)
    for value in suspects:
        why = _violation_of_value(field, bounds, value)
        if why is not None:
            return why
    return None


def _violation_of_value(field: FieldDescriptor, bounds: FieldBounds, value: Any) -> str | None:
    if bounds.unbounded:
        return None
    if field.type in TEXTS:
        return _trouble_of_text(bounds, value)
    if field.type in FLOATS and not math.isfinite(value):
        return f"{value} is not finite"
    if value < lowest(bounds):
        return f"{value} is less than {lowest(bounds)}"
    if value > bounds.high:
        return f"{value} is more than {bounds.high}"
    return None


def _trouble_of_text(bounds: FieldBounds, value: str | bytes) -> str | None:
    if not value:
        return "must not be empty" if bounds.required else None
    if bounds.max_len is not None and len(value) > bounds.max_len:
        return f"is {len(value)} long; {bounds.max_len} is allowed"
    form = bounds.pattern
    if form is not None and isinstance(value, str) and form.fullmatch(value) is None:
        return f"{value[:_SHOWN]!r} does not have the form {form.pattern}"
    return None


def too_many(descriptor: Descriptor, data: bytes) -> InvalidMessage | None:
    """Returns an error if the bytes of a message hold more values than anybody needs."""
    if len(data) <= _COUNTED_FROM_BYTES or has_few(descriptor, data, MOST_VALUES):
        return None
    return InvalidMessage(descriptor.name, "", f"has more than {MOST_VALUES} values")


def checked(parse: Parse | None, *, counted: bool = False) -> Parse | None:
    """Returns a parser for gRPC that gives an `InvalidMessage` for each message that breaks a rule.

    Args:
        parse: The parser of a stub or a servicer.
        counted: Whether to count the values of a message, too, before they are made.
    """
    kind = getattr(parse, "__self__", None)
    if parse is None or not isinstance(kind, type) or not issubclass(kind, Message):
        return parse
    descriptor: Any = kind.DESCRIPTOR
    offence = checker_of(descriptor).offence

    def read(data: bytes) -> Any:
        message = parse(data)
        return offence(message, data) or message

    if not counted:
        return read
    return lambda data: too_many(descriptor, data) or read(data)
