"""Single figures of a run, by short expressions: in result pages, and for a scenario's `expect`.

An expression is Jinja's: `cell(0, "Catenary", "mean") / cell(0, "NP", "mean")`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from catenary_lab.limits import Figure, at_least, at_most
from catenary_lab.scenarios.report import Cell, Table
from catenary_lab.scenarios.schema import Expectation
from catenary_services.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run, looked up by names; `table` is a table's index.

    A row is named by its first cell or its first two; `rows` is a regular expression searched in
    these names.

    Attributes:
        tables: The run's tables.
        facts: The run's facts.
    """

    tables: Sequence[Table]
    facts: Mapping[str, Any]

    def cell(self, table: int, row: str, column: str) -> float:
        """Returns the number in a cell; raises LookupError if there is no such row or column."""
        place = self._place(table, column)
        for each in self.tables[table].rows:
            if row in (each[0], f"{each[0]} {each[1]}"):
                return _number(each[place])
        raise self._missing(table, row)

    def column(
        self, table: int, column: str, rows: str = "", *, reference: bool = False
    ) -> list[float]:
        """Returns the numbers in a column; `reference` takes the `- reference` rows below instead.

        Raises:
            LookupError: There is no such row or column.
        """
        place, found = self._place(table, column), []
        every = self.tables[table].rows
        for row, below in zip(every, (*every[1:], ("",)), strict=True):
            named = re.search(rows, str(row[0])) or re.search(rows, f"{row[0]} {row[1]}")
            if row[0] != "- reference" and named:
                if not reference:
                    found.append(_number(row[place]))
                elif below[0] == "- reference":
                    found.append(_number(below[place]))
        if not found:
            raise self._missing(table, rows)
        return found

    def values(self, facts: str, key: str, **wanted: Any) -> list[Any]:
        """Returns what the entries of a list of facts that have the given values say under a key.

        Raises:
            LookupError: There is no such entry.
        """
        found = [
            each[key]
            for each in self.facts[facts]
            if all(each[name] == value for name, value in wanted.items())
        ]
        if not found:
            raise LookupError(f"none of {facts} has {wanted}")
        return found

    def times(self, table: int, ours: str, theirs: str, rows: str = "") -> list[float]:
        """Returns one column over another, row by row."""
        return ratios(self.column(table, ours, rows), self.column(table, theirs, rows))

    def saved(self, table: int, ours: str, theirs: str, rows: str = "") -> list[float]:
        """Returns the share by which one column is less than another, row by row."""
        return less(self.column(table, ours, rows), self.column(table, theirs, rows))

    def _place(self, table: int, column: str) -> int:
        header = self.tables[table].header
        if column not in header:
            raise LookupError(f"no column {column!r} in a table of {', '.join(header)}")
        return header.index(column)

    def _missing(self, table: int, row: str) -> LookupError:
        return LookupError(f"no row {row!r} in a table of {', '.join(self.tables[table].header)}")


WORDS = ("cell", "column", "values", "times", "saved")
"""Methods of `Figures` that expressions call; in a result page the record's name comes first."""


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


def _number(cell: Cell) -> float:
    """Returns the number with which a cell begins; 0.34 for "34 %"."""
    if isinstance(cell, int | float):
        return cell
    found = re.match(r"([-+]?\d+(?:\.\d+)?)( ?%)?", cell or "")
    if found is None:
        raise LookupError(f"{cell!r} begins with no number")
    return float(found[1]) / (100 if found[2] else 1)


FILTERS: Mapping[str, Callable[..., Any]] = {
    "n": lambda value, digits=0: f"{value:.{digits}f}",
    "percent": lambda value, digits=0: f"{100 * value:.{digits}f}",
    "range": lambda values, digits=0: _span(values, digits),
    "percents": lambda values, digits=0: _span([100 * each for each in values], digits),
    "sizes": lambda values: [abs(each) for each in values],
    "mean": lambda values: sum(values) / len(values),
}

ENVIRONMENT = SandboxedEnvironment(
    undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
)
ENVIRONMENT.filters.update(FILTERS)
ENVIRONMENT.globals |= {"ratios": ratios, "less": less, "differences": differences, "pick": pick}


def judged(
    expected: Sequence[Expectation], tables: Sequence[Table], facts: Mapping[str, Any]
) -> list[Figure]:
    """Returns what a scenario expects of its run as figures beside their limits.

    Raises:
        InvalidInput: An expression cannot be computed from these tables and facts.
    """
    figures = Figures(tables, facts)
    words = {word: getattr(figures, word) for word in WORDS}
    return [_judged(each, {**words, "facts": facts}) for each in expected]


def compiled(expected: Expectation) -> Callable[..., Any]:
    """Returns the expression as a function of its words; raises InvalidInput if it is none."""
    try:
        return ENVIRONMENT.compile_expression(expected.value, undefined_to_none=False)
    except TemplateError as error:
        raise InvalidInput(f"expect.{expected.name}", f"is no expression: {error}") from None


def _judged(expected: Expectation, words: Mapping[str, Any]) -> Figure:
    try:
        value = float(compiled(expected)(**words))
    except (TemplateError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidInput(f"expect.{expected.name}", f"cannot be computed: {error}") from None
    if expected.at_least is not None:
        return at_least(expected.name, value, expected.unit, expected.at_least)
    return at_most(expected.name, value, expected.unit, expected.at_most)
