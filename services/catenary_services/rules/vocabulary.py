"""The rules of fields, read from the options in the .proto files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor

from catenary_protos.catenary.v1 import rules_pb2

_F = FieldDescriptor
INTEGERS = {
    _F.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    _F.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    _F.TYPE_SFIXED32: (-(1 << 31), (1 << 31) - 1),
    _F.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    _F.TYPE_SINT64: (-(1 << 63), (1 << 63) - 1),
    _F.TYPE_SFIXED64: (-(1 << 63), (1 << 63) - 1),
    _F.TYPE_UINT32: (0, (1 << 32) - 1),
    _F.TYPE_FIXED32: (0, (1 << 32) - 1),
    _F.TYPE_UINT64: (0, (1 << 64) - 1),
    _F.TYPE_FIXED64: (0, (1 << 64) - 1),
    _F.TYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
"""Ranges of the integer types."""
FLOATS = (_F.TYPE_FLOAT, _F.TYPE_DOUBLE)
TEXTS = (_F.TYPE_STRING, _F.TYPE_BYTES)


@dataclass(frozen=True, slots=True)
class FieldBounds:
    """The bounds of a field.

    Attributes:
        low: The least value of a number.
        high: The greatest value of a number.
        max_len: The most characters of a text; None without a limit.
        pattern: What a whole text must match unless it is empty.
        max_items: The most items of a repeated field; None without a limit.
        required: Whether a message must be present, a text not empty, and a number not 0.
        unbounded: The reason why there is no bound; empty if there is one.
    """

    low: int | float = -math.inf
    high: int | float = math.inf
    max_len: int | None = None
    pattern: re.Pattern[str] | None = None
    max_items: int | None = None
    required: bool = False
    unbounded: str = ""


def bounds_of(field: FieldDescriptor) -> FieldBounds:
    """Returns the rules of a field: its own, then those of its kind, then its type's range."""
    rules = rules_pb2.Rules()
    own = field.GetOptions().Extensions[rules_pb2.rules]
    kind = getattr(own, "is")
    if kind:
        value = rules_pb2.Rules.Kind.DESCRIPTOR.values_by_number[kind]
        rules.MergeFrom(value.GetOptions().Extensions[rules_pb2.bounds])
    rules.MergeFrom(own)
    low, high = INTEGERS.get(field.type, (-math.inf, math.inf))
    return FieldBounds(
        rules.gte if rules.HasField("gte") else low,
        rules.lte if rules.HasField("lte") else high,
        rules.max_len if rules.HasField("max_len") else None,
        re.compile(rules.pattern) if rules.pattern else None,
        rules.max_items if rules.HasField("max_items") else None,
        rules.required,
        rules.unbounded,
    )


def is_nested(field: FieldDescriptor) -> bool:
    """True if a field is a message or a list of messages."""
    return bool(field.type == _F.TYPE_MESSAGE)


def lowest(bounds: FieldBounds) -> float:
    """Returns the least value that a number may have."""
    return max(bounds.low, 1) if bounds.required else bounds.low
