"""What a scenario found, ready to be written: tables, plots and plain facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """Points (x, y) by label."""
    log_x: bool = False
    log_y: bool = False


Panel = Bars | Lines


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture: panels side by side."""

    name: str
    """Of its file, without suffix."""
    panels: tuple[Panel, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One scenario's findings."""

    name: str
    """Of the scenario's file, without suffix."""
    title: str
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    """Sentences below the tables."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What `--json` prints."""

    def text(self) -> str:
        """Returns everything but the pictures, to be printed."""
        tables = [table.markdown() for table in self.tables]
        return "\n\n".join([f"# {self.title}", *tables, *self.notes])

    def markdown(self) -> str:
        """Returns the section's text; pictures are beside the document."""
        parts = [table.markdown() for table in self.tables]
        parts += [f"![{each.caption or self.title}]({each.name}.png)" for each in self.figures]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean; None of nothing."""
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
