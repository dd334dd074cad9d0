"""Findings of a scenario in a form ready to be written: tables, plots and plain facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from catenary_lab.scenarios.schema import Expectation, Scenario

Cell = str | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below a header; numbers are written with three digits unless they come as text."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        """Returns the table, its caption above it."""
        lines = [f"**{self.caption}**", "", _line(self.header)]
        lines.append("|" + "|".join(["---", *["---:"] * (len(self.header) - 1)]) + "|")
        lines += [_line([_text(cell) for cell in row]) for row in self.rows]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that is tabled and perhaps drawn.

    Attributes:
        key: Its key in the facts of a run.
        caption: Caption of its table, with the unit.
        scale: Factor that turns the fact into that unit.
        digits: Number of digits behind the point.
        drawn: Whether there is a panel of it.
    """

    key: str
    caption: str
    scale: float = 1.0
    digits: int = 1
    drawn: bool = True

    def text(self, value: float | None) -> str | None:
        """Returns the fact as text for a cell; None if it is None."""
        return None if value is None else f"{self.scale * value:.{self.digits}f}"


@dataclass(frozen=True, slots=True)
class Bars:
    """Groups of bars: one series per colour, one value per group (None: no bar)."""

    title: str
    y_label: str
    groups: tuple[str, ...]
    series: Mapping[str, tuple[float | None, ...]]
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over one axis."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, tuple[tuple[float, float], ...]]
    """Points (x, y) of each curve, by its label."""
    log_x: bool = False
    log_y: bool = False


Panel = Bars | Lines


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture that consists of panels side by side."""

    name: str
    """Name of the picture's file, without suffix."""
    panels: tuple[Panel, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a scenario.

    Attributes:
        tables: Tables, one after the other.
        panels: Panels of its picture; none: there is no picture.
        notes: Sentences below the tables.
        facts: The document that `--json` prints.
    """

    tables: tuple[Table, ...]
    panels: tuple[Panel, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """One scenario's findings under its name and title."""

    name: str
    """Name of the scenario's file, without suffix."""
    title: str
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    """Sentences below the tables."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The document that `--json` prints."""
    expect: Sequence[Expectation] = ()

    def beside(self, more: Findings) -> Report:
        """Returns the report with further findings, whose picture replaces this one's."""
        picture = (Figure(self.name, more.panels, self.title),) if more.panels else self.figures
        return replace(
            self,
            tables=(*self.tables, *more.tables),
            figures=picture,
            notes=(*self.notes, *more.notes),
            facts={**self.facts, **more.facts},
        )

    def text(self) -> str:
        """Returns everything but the pictures, to be printed."""
        tables = [table.markdown() for table in self.tables]
        return "\n\n".join([f"# {self.title}", *tables, *self.notes])

    def markdown(self) -> str:
        """Returns the text of the section; pictures are beside the document."""
        parts = [table.markdown() for table in self.tables]
        parts += [f"![{each.caption or self.title}]({each.name}.png)" for each in self.figures]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)


def report_of(name: str, scenario: Scenario, findings: Findings) -> Report:
    """Returns the report of a scenario; sentences of its file come last.

    Args:
        name: Name of the scenario's file, without suffix.
        scenario: The scenario.
        findings: Its findings.
    """
    picture = Figure(name, findings.panels, scenario.title)
    notes = (*findings.notes, *getattr(scenario, "notes", ()))
    figures = (picture,) if findings.panels else ()
    return Report(
        name, scenario.title, findings.tables, figures, notes, findings.facts, scenario.expect
    )


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean; None if there are no values."""
    return sum(values) / len(values) if values else None


def percent(better: float | None, worse: float | None) -> str | None:
    """Returns by how much one number exceeds another, in words of a table; None if unknown."""
    if better is None or not worse:
        return None
    return f"{100 * (better / worse - 1):+.0f} %"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else f"{cell:.3f}"
