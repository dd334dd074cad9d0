"""Single fields of a JSON body, each of the type it must have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from catenary_gateway.generation.intake import is_unicode
from catenary_services.errors import InvalidInput

Fields = Mapping[str, Any]


def text(fields: Fields, name: str) -> str:
    """Returns a text that must be present and not empty."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(name, "must be a text and not empty")
    return value


def flag(fields: Fields, name: str) -> bool:
    """Returns a boolean; False if it is absent or null."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(name, "must be true or false")
    return bool(value)


def integer(fields: Fields, name: str, default: int) -> int:
    """Returns an integer; `default` if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(name, "must be an integer")
    return value


def number(fields: Fields, name: str, default: float) -> float:
    """Returns a finite number, limited to 1e18 in magnitude; `default` if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(name, "must be a number")
    # JSON integers have any size; those beyond 1e18 are out of every field's range.
    value = float(min(max(value, -1e18), 1e18))
    if not math.isfinite(value):
        raise InvalidInput(name, "must be finite")
    return value


def mapping(fields: Fields, name: str) -> Fields:
    """Returns an object; an empty one if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(name, "must be an object")
    return value


def texts(fields: Fields, name: str) -> tuple[str, ...]:
    """Returns a text or a list of texts; none if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InvalidInput(name, "must be a text or a list of texts")
    if not all(map(is_unicode, found)):
        raise InvalidInput(name, "has halves of characters (lone surrogates)")
    return tuple(found)


def token_ids(fields: Fields, name: str, most: int) -> tuple[int, ...]:
    """Returns a list of at most `most` token ids; none if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise InvalidInput(name, "must be a list of token ids")
    if len(value) > most:
        raise InvalidInput(name, f"has more than {most} tokens")
    return tuple(value)
