"""Documents of JSON and YAML as typed records, with errors that name the place."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar

import msgspec

from catenary_services.errors import InvalidInput

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`")
_EXPECTED = re.compile(r"Expected `(\w+)(?: \| null)?`(.*?)(?:, got `(\w+)`)?")


class _Version(msgspec.Struct):
    version: int


def converted(document: Any, kind: type[T], where: str) -> T:
    """Returns a document, as JSON or YAML is read, as a struct, dataclass or other type.

    Fields that a dataclass does not have are ignored, and so with a struct that does not forbid it.

    Raises:
        InvalidInput: If something is missing or wrong; the field names it, such as "where.a[1].b".
    """
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(*_named(str(error), where)) from None


def _named(error: str, where: str) -> tuple[str, str]:
    """Returns the place of a msgspec error, and what is wrong there in words."""
    text, _, path = error.rpartition(" - at `$")
    text, place = (text, where + path.rstrip("`")) if text else (error, where)
    if found := _FIELD.fullmatch(text):
        problem = "is missing" if found[1] == "missing required" else "is unknown"
        return f"{place}.{found[2]}".lstrip("."), problem
    if found := _EXPECTED.fullmatch(text):
        kind, bound, given = found.groups()
        text = "is missing" if given == "null" else f"must be {_KINDS.get(kind, kind)}{bound}"
    return place.lstrip("."), text


def check_version(document: Any, known: int, where: str) -> None:
    """Returns if a document says that it is of the version that this program reads.

    Raises:
        InvalidInput: If it is of another one, or says nothing.
    """
    version = converted(document, _Version, where).version
    if version != known:
        raise InvalidInput(f"{where}.version", f"is {version}, this program reads {known}")


def document_of(record: Any) -> Any:
    """Returns a struct or dataclass as `converted` reads it, made of dicts and lists."""
    return json.loads(json.dumps(msgspec.to_builtins(record)))
