"""Reading of JSON documents field by field, with errors that name the place."""

from __future__ import annotations

import json
from typing import Any

from catenary_services.errors import InvalidInput

_MAGNITUDE = 1e15
"""Numbers larger than this are taken for mistakes."""


def parse(text: str) -> JsonFields:
    """Returns the fields of a JSON object.

    Raises:
        InvalidInput: The text is something else.
    """
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("file", f"is not JSON: {error}") from None
    return JsonFields(document, "")


class JsonFields:
    """A JSON object at a certain place of a document.

    Attributes:
        place: Path of the object, such as `cases[2].perf`; empty for the whole document.
    """

    def __init__(self, document: Any, place: str) -> None:
        if not isinstance(document, dict):
            raise InvalidInput(place or "file", "must be a JSON object")
        self._document: dict[str, Any] = document
        self.place = place

    def at(self, name: str) -> str:
        """Returns the path of a field."""
        return f"{self.place}.{name}" if self.place else name

    def has(self, name: str) -> bool:
        """True if the field is present and not null."""
        return self._document.get(name) is not None

    def wrong(self, name: str, message: str) -> InvalidInput:
        """Returns an error about a field."""
        return InvalidInput(self.at(name), message)

    def number(self, name: str, least: float = 0.0, most: float = _MAGNITUDE) -> float:
        """Returns a field that is a number in [least, most]."""
        value = self._given(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number")
        if not least <= value <= most:
            raise self.wrong(name, f"must be {_range(least, most)}")
        return float(value)

    def whole(self, name: str, least: int = 0, most: int = int(_MAGNITUDE)) -> int:
        """Returns a field that is a whole number in [least, most]."""
        value = self._given(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "must be a whole number")
        if not least <= value <= most:
            raise self.wrong(name, f"must be {_range(least, most)}")
        return value

    def flag(self, name: str) -> bool:
        """Returns a field that is true or false; false if it is absent."""
        value = self._document.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Returns a field that is a text; `default` if it is absent."""
        value = self._document.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "must be a text")
        return value

    def object(self, name: str) -> JsonFields:
        """Returns a field that is an object."""
        return JsonFields(self._given(name), self.at(name))

    def objects(self, name: str) -> list[JsonFields]:
        """Returns a field that is a list of objects."""
        return _objects(self._given(name), self.at(name))

    def lists(self, name: str) -> list[list[JsonFields]]:
        """Returns a field that is a list of lists of objects."""
        place = self.at(name)
        rows = _list(self._given(name), place)
        return [_objects(row, f"{place}[{number}]") for number, row in enumerate(rows)]

    def row(self, name: str) -> list[Any]:
        """Returns a field that is a list of anything."""
        return _list(self._given(name), self.at(name))

    def rows(self, name: str) -> list[list[Any]]:
        """Returns a field that is a list of lists of anything."""
        place = self.at(name)
        rows = _list(self._given(name), place)
        return [_list(row, f"{place}[{number}]") for number, row in enumerate(rows)]

    def texts(self, name: str) -> list[str]:
        """Returns a field that is a list of texts."""
        values = _list(self._given(name), self.at(name))
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(name, "must be a list of texts")
        return values

    def wholes(self, name: str) -> dict[str, int]:
        """Returns a field that is an object of whole numbers of at least 0, by their names."""
        fields = self.object(name)
        return {each: fields.whole(each) for each in fields._document}

    def _given(self, name: str) -> Any:
        value = self._document.get(name)
        if value is None:
            raise self.wrong(name, "is missing")
        return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidInput(place, "must be a list")
    return value


def _objects(value: Any, place: str) -> list[JsonFields]:
    return [
        JsonFields(each, f"{place}[{number}]") for number, each in enumerate(_list(value, place))
    ]


def _range(least: float, most: float) -> str:
    if most >= _MAGNITUDE:
        return f"{least:g} or more, and no more than {_MAGNITUDE:g}"
    return f"between {least:g} and {most:g}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
