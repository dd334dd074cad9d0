"""Readers for the fields of a plan document. Every error names the field it is about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, Nanoseconds
from catenary_services.errors import InvalidInput


def fields_of(
    value: object, path: str, *, required: Sequence[str], optional: Sequence[str]
) -> Mapping[str, object]:
    """Returns a mapping with all required fields and no unknown one, or raises InvalidInput."""
    where = path or "document"
    if not isinstance(value, Mapping):
        raise InvalidInput(where, "must be a mapping")
    prefix = f"{path}." if path else ""
    for name in value:
        if name not in required and name not in optional:
            raise InvalidInput(f"{prefix}{name}", "unknown field")
    for name in required:
        if name not in value:
            raise InvalidInput(f"{prefix}{name}", "is missing")
    return value


def items_of(value: object, path: str) -> list[tuple[int, object]]:
    """Returns the numbered items of a list. Raises InvalidInput if the list is empty."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidInput(path, "must be a list")
    if not value:
        raise InvalidInput(path, "must not be empty")
    return list(enumerate(value))


def text_of(value: object, path: str) -> str:
    """Returns a text. Raises InvalidInput if it is empty."""
    if not isinstance(value, str) or not value:
        raise InvalidInput(path, "must be a non-empty text")
    return value


def integer_of(value: object, path: str, *, least: int) -> int:
    """Returns a whole number. Raises InvalidInput if it is less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(path, f"must be a whole number of at least {least}")
    return value


def blocks_of(value: object, path: str) -> tuple[int, int]:
    """Returns a range of blocks `[first, end)`. Raises InvalidInput if it is empty."""
    blocks = [block for _, block in items_of(value, path)]
    if len(blocks) != 2:
        raise InvalidInput(path, "must be two numbers: the first block and the end")
    first = integer_of(blocks[0], f"{path}[0]", least=0)
    return first, integer_of(blocks[1], f"{path}[1]", least=first + 1)


def slo_of(value: object, path: str) -> Nanoseconds:
    """Returns, in nanoseconds, a deadline that is given in milliseconds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise InvalidInput(path, "must be a positive number of milliseconds")
    return max(1, round(value * NANOSECONDS_PER_MILLISECOND))  # type: ignore[operator]
