"""Checks of a message's rules on its bytes, without parsing it.

`_wire.pyx` scans the bytes with a table, many times as fast as the function of `compiling` checks
the parsed message. It accepts only what that function would accept; what it doubts is parsed and
checked. Where nothing was compiled, or with `CATENARY_PURE=1`, there are no walks, and every
message is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from catenary_services.rules.relations import RELATIONS, Relation, SameText
from catenary_services.rules.vocabulary import (
    FLOATS,
    INTEGERS,
    TEXTS,
    FieldBounds,
    bounds_of,
    is_nested,
    lowest,
)

_wire: Any = None
if os.environ.get("CATENARY_PURE") != "1":
    with suppress(ImportError):
        from catenary_services.rules import _wire  # type: ignore[attr-defined, no-redef]
COMPILED = _wire is not None

Walk = Callable[[bytes], bool]
Sum = tuple[tuple[int, ...], int, int]
"""A triple: notes that are added up, a constant that is added, and the note that receives the sum
or bounds it."""

_F = FieldDescriptor
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_WRITTEN = {
    _F.TYPE_UINT32: (1, _VARINT),
    _F.TYPE_UINT64: (1, _VARINT),
    _F.TYPE_INT32: (2, _VARINT),
    _F.TYPE_INT64: (2, _VARINT),
    _F.TYPE_ENUM: (2, _VARINT),
    _F.TYPE_SINT32: (3, _VARINT),
    _F.TYPE_SINT64: (3, _VARINT),
    _F.TYPE_BOOL: (4, _VARINT),
    _F.TYPE_FIXED32: (5, _FIXED32),
    _F.TYPE_SFIXED32: (6, _FIXED32),
    _F.TYPE_FIXED64: (7, _FIXED64),
    _F.TYPE_SFIXED64: (8, _FIXED64),
    _F.TYPE_FLOAT: (9, _FIXED32),
    _F.TYPE_DOUBLE: (10, _FIXED64),
    _F.TYPE_STRING: (11, _DELIMITED),
    _F.TYPE_BYTES: (12, _DELIMITED),
    _F.TYPE_MESSAGE: (13, _DELIMITED),
}
"""The kind of each field type, numbered as in `_wire.pyx`, and its wire type."""
_UNSIGNED = (_F.TYPE_UINT32, _F.TYPE_UINT64)
_UNLIMITED = (1 << 63) - 1
_PLAIN = re.compile(r"(\[[^]]+\])?(\[[^]]+\])\*")
"""Patterns that a table of ASCII characters can express: one class of characters, then any number
of another."""


@dataclass(slots=True)
class WireField:
    """One field as a table of `_wire.pyx` is given it; `_wire.pyx` explains the numbers."""

    number: int
    kind: int
    wire: int
    bit: int
    alone: int
    is_repeated: bool
    most_items: int = 0
    note: int = -1
    low: float = 0
    high: float = 0
    is_bounded: bool = True
    is_required: bool = False
    is_needed: bool = False
    form: Callable[[str], object] | None = None
    ascii: bytes | None = None
    inside: object = None
    sums: list[Sum] = field(default_factory=list)


def walk_of(descriptor: Descriptor) -> Walk | None:
    """Returns a function that is True for bytes of a message that keeps its rules.

    It may be False for a good message. Where nothing was compiled there is no function, but None.
    """
    if not COMPILED:
        return None
    walk: Walk = _table(descriptor, ())[0].walk
    return walk


@lru_cache(maxsize=None)  # noqa: UP033 - a few for each type of message there is
def _table(descriptor: Descriptor, asked: tuple[str, ...]) -> tuple[Any, dict[str, int]]:
    """Returns a table, and the places of fields that relations of the outer message refer to."""
    notes = _Notes(descriptor)
    for name in asked:
        notes.of(name)
    relations = tuple(map(notes.related, RELATIONS.get(descriptor.full_name, ())))
    fields = [_field(each, notes) for each in descriptor.fields]
    return _wire.WireTable(fields, relations, notes.count), notes.places


class _Notes:
    """Places where a walk keeps the numbers that relations and limits of a message refer to.

    A text takes two places: it is kept as its address and its length.
    """

    def __init__(self, descriptor: Descriptor) -> None:
        self._fields: Any = descriptor.fields_by_name
        self.count = 0
        self.places: dict[str, int] = {}
        self.inner: dict[str, dict[tuple[str, ...], int]] = {}
        """Sums of fields of inner messages whose largest value is kept, with its place, by outer
        field."""

    def of(self, name: str) -> int:
        """Returns the place of a field's number, text, or number of items."""
        if name not in self.places:
            self.places[name] = self._new(self._fields[name])
        return self.places[name]

    def related(self, relation: Relation) -> tuple[Sum, int | None]:
        """Returns a relation between notes, with its bound, as a table has it.

        The bound is None for two texts that are equal.

        Raises:
            ValueError: It relates fields that a walk cannot compare.
        """
        if isinstance(relation, SameText):
            paths = (relation.field, relation.other)
            self._require(TEXTS, *paths)
            return (tuple(self._at(*path.split(".")) for path in paths), 0, -1), None
        by_head: dict[str, list[str]] = {}
        places: list[int] = []
        for part in relation.parts:
            if isinstance(part, str):
                self._require(_UNSIGNED, part)
                head, _, name = part.partition(".")
                if name:
                    by_head.setdefault(head, []).append(name)
                else:
                    places.append(self.of(part))
        places += [self._at(head, *names) for head, names in by_head.items()]
        plus = sum(part for part in relation.parts if isinstance(part, int))
        if isinstance(relation.most, int):
            return (tuple(places), plus, -1), relation.most
        if not self._fields[relation.most].is_repeated:
            self._require(_UNSIGNED, relation.most)
        return (tuple(places), plus, self.of(relation.most)), 0

    def _require(self, types: Sequence[int], *paths: str) -> None:
        for path in paths:
            head, _, name = path.partition(".")
            field = self._fields[head]
            is_one_of_many = field.is_repeated and types is TEXTS
            if name:
                field = field.message_type.fields_by_name[name]
            if field.type not in types or field.is_repeated or is_one_of_many:
                raise ValueError(f"no relation can be about {path}")

    def _at(self, head: str, *names: str) -> int:
        """Returns the place of a field, or of the sum of some fields of its inner messages."""
        if not names:
            return self.of(head)
        sums = self.inner.setdefault(head, {})
        if names not in sums:
            sums[names] = self._new(self._fields[head].message_type.fields_by_name[names[0]])
        return sums[names]

    def _new(self, field: FieldDescriptor) -> int:
        place = self.count
        self.count += 2 if _is_text(field) else 1
        return place


def _field(field: FieldDescriptor, notes: _Notes) -> WireField:
    bounds = bounds_of(field)
    kind, wire = _WRITTEN[field.type]
    bit = 1 << field.index
    oneof: Any = field.containing_oneof
    alone = bit if oneof is None else sum(1 << each.index for each in oneof.fields)
    made = WireField(field.number, kind, wire, bit, alone, bool(field.is_repeated))
    if field.is_repeated:
        made.most_items = bounds.max_items or 0
        notes.of(field.name)
    made.note = notes.places.get(field.name, -1)
    if is_nested(field):
        inside: Any = field.message_type
        sums = notes.inner.get(field.name, {})
        asked = tuple(sorted({name for names in sums for name in names}))
        made.inside, places = _table(inside, asked)
        made.is_needed = bounds.required and not field.is_repeated
        for names, place in sums.items():
            made.sums.append((tuple(places[name] for name in names), 0, place))
            if _is_text(inside.fields_by_name[names[0]]):
                made.sums.append(((places[names[0]] + 1,), 0, place + 1))
        return made
    _limit(made, field, bounds)
    return made


def _limit(made: WireField, field: FieldDescriptor, bounds: FieldBounds) -> None:
    """Sets the values a field may have, and that it must be present where 0 is not among them."""
    free = bool(bounds.unbounded)
    if field.type in TEXTS:
        made.high = _UNLIMITED if free or bounds.max_len is None else bounds.max_len
        made.is_required = bounds.required and not free
        made.is_needed = made.is_required and not field.is_repeated
        if bounds.pattern is not None and not free:
            made.form, made.ascii = _form(bounds.pattern)
        return
    if field.type in FLOATS:
        made.is_bounded = not free
        made.low, made.high = lowest(bounds), bounds.high
    else:
        low, high = INTEGERS.get(field.type, (0, 1))  # a bool is 0 or 1
        made.low = low if free else max(low, int(max(lowest(bounds), low)))
        made.high = high if free else int(min(bounds.high, high))
    allowed = free or made.low <= 0 <= made.high
    made.is_needed = not allowed and not field.is_repeated


@lru_cache(maxsize=None)  # noqa: UP033 - one for each form there is
def _form(pattern: re.Pattern[str]) -> tuple[Callable[[str], object], bytes | None]:
    """Returns a function that matches a text, and a table that does so for ASCII texts."""
    plain = _PLAIN.fullmatch(pattern.pattern)
    if plain is None:
        return pattern.fullmatch, None
    begins, goes_on = plain[1] or plain[2], plain[2]
    return pattern.fullmatch, _members(begins) + _members(goes_on)


def _members(characters: str) -> bytes:
    return bytes(re.fullmatch(characters, chr(code)) is not None for code in range(128))


def _is_text(field: FieldDescriptor) -> bool:
    return field.type in TEXTS and not field.is_repeated
