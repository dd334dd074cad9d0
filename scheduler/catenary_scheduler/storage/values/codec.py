"""The one codec of stored values: a value is read whole and checked, or not at all.

A value has one of two forms, both described by a `msgspec.Struct` or a dataclass:

* a *document* is a JSON object. Unknown fields are ignored. A missing field has the default of the
  struct; without a default the value is unreadable.
* a *line* is numbers with spaces between, for what is written thousands of times a second. Its
  struct is `array_like`: numbers may be added at the end only, by the same rules.

Version 1 of both is what schedulers have written since the first release, and carries no version
number: a scheduler that does not know versions refuses a plan with a field it does not know. The
version is raised only when a value can no longer be read by the rules above; from 2 on a document
carries it as `v`, a line as a first word such as `v2`. A value of a later version than `VERSION` is
unreadable here, and kept for a scheduler that can read it (`quarantine`).
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

VERSION: Final = 1
"""The version this scheduler writes, and the highest it reads."""
LARGEST_VALUE_BYTES: Final = 4 << 20
"""The largest value read. No written value comes near: a plan of a thousand agents is some 100
KB."""

_LINE_VERSION = re.compile(r"v(\d{1,9})(?: |$)")
_NUMBERS_OF_LINE: Final = 4096
T = TypeVar("T")


class UnreadableRecord(ValueError):  # noqa: N818 - what it is
    """A stored name or value is not what its table holds; the text says why."""


class _Version(msgspec.Struct):
    v: int = VERSION


def encode_document(record: object) -> str:
    """Returns a struct or dataclass as the JSON text that `decode_document` reads."""
    return msgspec.json.encode(record).decode()


def decode_document(text: str, kind: type[T]) -> T:
    """Returns the record of the given kind that a JSON text holds.

    Raises:
        UnreadableRecord: The text holds no such record.
    """
    try:
        version = msgspec.json.decode(text, type=_Version).v
        if not 1 <= version <= VERSION:
            raise UnreadableRecord(f"is of version {version}; this scheduler reads {VERSION}")
        return msgspec.json.decode(text, type=kind)
    # Text with half of a surrogate pair also raises a ValueError.
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise UnreadableRecord(str(error)) from None


def checked(value: object, kind: type[T]) -> T:
    """Returns dicts, lists and numbers that were read as a record of the given kind.

    Raises:
        UnreadableRecord: They are no such record.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise UnreadableRecord(str(error)) from None


def encode_line(record: msgspec.Struct) -> str:
    """Returns the numbers of an `array_like` struct as a line."""
    return " ".join(map(str, msgspec.structs.astuple(record)))


def decode_line(text: str, kind: Any) -> Any:
    """Returns the record of the given kind that a line holds.

    Raises:
        UnreadableRecord: The line holds no such record.
    """
    found = _LINE_VERSION.match(text)
    if found is not None and not 1 <= int(found[1]) <= VERSION:
        raise UnreadableRecord(f"is of version {found[1]}; this scheduler reads {VERSION}")
    words = (text[found.end() :] if found is not None else text).split(" ", _NUMBERS_OF_LINE)
    try:
        return msgspec.convert(words, kind, strict=False)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise UnreadableRecord(str(error)) from None


def as_builtins(record: object) -> Any:
    """Returns a record as dicts, lists, texts and numbers."""
    return msgspec.to_builtins(record)
