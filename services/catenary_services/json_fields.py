"""Reading values from JSON documents, with errors that name the place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from catenary_services.errors import InvalidInput


def field(document: Any, key: str, kind: type, where: str) -> Any:
    """Returns `document[key]`, which is of type `kind`.

    Raises:
        InvalidInput: The document is no object, or the key is missing or of another type.
    """
    if not isinstance(document, dict):
        raise InvalidInput(where, "is not an object")
    if key not in document:
        raise InvalidInput(f"{where}.{key}", "is missing")
    value = document[key]
    # bool is an int in Python, but `"version": true` is a mistake.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidInput(f"{where}.{key}", f"is not of type {kind.__name__}")
    return value


def integers(values: Iterable[Any], lowest: int, where: str) -> tuple[int, ...]:
    """Returns the values, all of them integers of at least `lowest`.

    Raises:
        InvalidInput: `values` is no list, or one of them is something else; the field names it.
    """
    if not isinstance(values, list | tuple):
        raise InvalidInput(where, "is not a list")
    for i, value in enumerate(values):
        if type(value) is not int or value < lowest:
            raise InvalidInput(f"{where}[{i}]", f"{value!r} is not an integer >= {lowest}")
    return tuple(values)
