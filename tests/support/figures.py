"""Figures that system tests measure: printed at once, and as one table at the end of the run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(os.environ.get("CATENARY_FIGURES", "build/figures.jsonl"))


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value beside its limit, e.g. Figure("failover", "standby leads", 1.9, "s", "<= 3")."""

    test: str
    what: str
    value: float | str
    unit: str = ""
    limit: str = ""

    def __str__(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        limit = f"   (limit {self.limit})" if self.limit else ""
        return f"{self.test}: {self.what}: {value} {self.unit}".rstrip() + limit


_seen: list[Figure] = []


def report(test: str, what: str, value: float | str, unit: str = "", limit: str = "") -> None:
    """Prints a figure and keeps it; the test asserts the limit by itself."""
    figure = Figure(test, what, value, unit, limit)
    _seen.append(figure)
    print(figure)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with FILE.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(figure)) + "\n")


def seen() -> tuple[Figure, ...]:
    """Returns the figures of this run."""
    return tuple(_seen)
