"""Number of values in a message, counted in its bytes before objects are made of them.

An empty message takes two bytes on the wire and eighty in memory, so that 16 MiB could become 700.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor

from catenary_services.rules.vocabulary import is_nested

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


def has_few(descriptor: Descriptor, data: bytes, most: int) -> bool:
    """Returns True if a message holds at most `most` values, and for bytes that are no message.

    Values are messages, texts and packed numbers; eight packed numbers count as one.
    """
    left = most
    unread = [(descriptor, 0, len(data))]
    try:
        while unread:
            kind, at, end = unread.pop()
            nested = _nested_in(kind)
            while at < end:
                key, at = _varint(data, at)
                wire = key & 7
                if wire == _DELIMITED:
                    size, at = _varint(data, at)
                    inside = nested.get(key >> 3)
                    if inside is not None and size:
                        unread.append((inside, at, min(at + size, end)))
                    left -= 1 if inside is not None else 1 + size // 8
                    at += size
                elif wire == _VARINT:
                    _, at = _varint(data, at)
                elif wire in (_FIXED64, _FIXED32):
                    at += 8 if wire == _FIXED64 else 4
                else:
                    return True  # the parser reports these bytes
                if left < 0:
                    return False
    except IndexError:
        return True
    return True


@lru_cache(maxsize=None)  # noqa: UP033 - one for each type of message there is
def _nested_in(descriptor: Descriptor) -> dict[int, Descriptor]:
    fields: Any = descriptor.fields
    return {field.number: field.message_type for field in fields if is_nested(field)}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    shift = 7
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError  # a varint is never so long
