"""Documents of JSON and YAML as typed records, with errors that name the place."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from catenary_services.errors import InvalidInput

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

_FIELD_PROBLEMS = {
    "Object missing required field `": "is missing",
    "Object contains unknown field `": "is unknown",
}


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
        text, _, place = str(error).rpartition(" - at `$")
        text, place = (text, where + place.rstrip("`")) if text else (str(error), where)
        for start, problem in _FIELD_PROBLEMS.items():
            if text.startswith(start):
                name = text.removeprefix(start).rstrip("`")
                raise InvalidInput(f"{place}.{name}" if place else name, problem) from None
        raise InvalidInput(place.lstrip("."), text[:1].lower() + text[1:]) from None


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
    return msgspec.json.decode(msgspec.json.encode(record))
