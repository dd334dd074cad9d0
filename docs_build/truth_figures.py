"""Numbers that templates of result pages take from records, and filters to format them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


def cell(table: Mapping[str, Any], row: str, column: str) -> float:
    """Returns the number in a cell; a row is named by its first cell or its first two."""
    place = table["header"].index(column)
    for each in table["rows"]:
        if row in (each[0], f"{each[0]} {each[1]}"):
            return _number(each[place])
    raise LookupError(f"no row {row!r} in a table of {', '.join(table['header'])}")


def column(
    table: Mapping[str, Any], column: str, rows: str, *, reference: bool = False
) -> list[float]:
    """Returns the numbers in a column.

    Args:
        table: A table of a record's page.
        column: Header of the column.
        rows: A regular expression searched in the names of rows (first cell, or first two).
        reference: Whether to take the `- reference` rows below those instead.

    Raises:
        LookupError: There is no such row.
    """
    place, found = table["header"].index(column), []
    for number, row in enumerate(table["rows"]):
        below = table["rows"][number + 1] if number + 1 < len(table["rows"]) else [""]
        named = re.search(rows, row[0]) or re.search(rows, f"{row[0]} {row[1]}")
        if row[0] != "- reference" and named:
            if not reference:
                found.append(_number(row[place]))
            elif below[0] == "- reference":
                found.append(_number(below[place]))
    if not found:
        raise LookupError(f"no row {rows!r} in a table of {', '.join(table['header'])}")
    return found


def pick(entries: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Returns the first of some facts with the given values."""
    return next(
        each for each in entries if all(each[key] == value for key, value in wanted.items())
    )


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Returns ours over theirs, pair by pair, where theirs is not 0."""
    return [one / other for one, other in zip(ours, theirs, strict=True) if other]


def less(ours: list[float], theirs: list[float]) -> list[float]:
    """Returns the share by which ours is less than theirs, pair by pair."""
    return [1 - each for each in ratios(ours, theirs)]


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    """Returns ours less theirs, pair by pair."""
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def _span(values: list[float], digits: int) -> str:
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return least if least == most else f"{least} to {most}"


def _number(cell: str | float) -> float:
    """Returns the number with which a cell begins; 0.34 for "34 %"."""
    if not isinstance(cell, str):
        return cell
    found = re.match(r"([-+]?\d+(?:\.\d+)?)( ?%)?", cell)
    if found is None:
        raise ValueError(f"{cell!r} begins with no number")
    return float(found[1]) / (100 if found[2] else 1)


FILTERS: Mapping[str, Callable[..., Any]] = {
    "n": lambda value, digits=0: f"{value:.{digits}f}",
    "percent": lambda value, digits=0: f"{100 * value:.{digits}f}",
    "range": lambda values, digits=0: _span(values, digits),
    "percents": lambda values, digits=0: _span([100 * each for each in values], digits),
    "sizes": lambda values: [abs(each) for each in values],
    "mean": lambda values: sum(values) / len(values),
}
