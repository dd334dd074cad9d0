"""docs/failures.md beside the registry: what it promises is what the code promises, and its figures.

`python -m faults.page FILE.json ...` writes into the page what runs of `make chaos` measured.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faults.all_faults import REGISTRY
from faults.base import Promise

PAGE = Path(__file__).resolve().parents[3] / "docs" / "failures.md"
_ROW = re.compile(r"^\| `(?P<name>[a-z-]+)` \| (?P<cells>.*) \|$")


@dataclass(frozen=True, slots=True)
class Row:
    """One fault of the page, as it is written there."""

    name: str
    about: str
    client: str
    served: str
    recovered: str
    measured: str
    cluster: str

    def __str__(self) -> str:
        cells = (self.about, self.client, self.served, self.recovered, self.measured, self.cluster)
        return f"| `{self.name}` | {' | '.join(cells)} |"


def served_text(promise: Promise) -> str:
    """Returns from when on everything is answered although the fault lasts."""
    return "no" if promise.served_s is None else f"{promise.served_s:g} s"


def recovered_text(promise: Promise) -> str:
    return f"{promise.recovered_s:g} s"


def rows(text: str) -> dict[str, Row]:
    """Returns the faults of a page by name."""
    found = {}
    for line in text.splitlines():
        match = _ROW.match(line)
        cells = match["cells"].split(" | ") if match else []
        if match and len(cells) == 6:
            assert match["name"] not in found, f"{match['name']} has two rows"
            found[match["name"]] = Row(match["name"], *cells)
    return found


def measured(results: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Returns what runs measured of faults that came alone: median, most and how often."""
    times: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for spell in result["spells"]:
            if len(spell["faults"]) == 1 and spell["recovered_s"] is not None:
                times[spell["faults"][0]].append(spell["recovered_s"])
    return {
        name: f"{statistics.median(each):.1f} s, {max(each):.1f} s ({len(each)})"
        for name, each in times.items()
    }


def with_figures(text: str, figures: dict[str, str]) -> str:
    """Returns the page with new figures, and the promises of the code."""
    return "\n".join(_renewed(line, figures) for line in text.splitlines()) + "\n"


def _renewed(line: str, figures: dict[str, str]) -> str:
    row = next(iter(rows(line).values()), None)
    if row is None or row.name not in REGISTRY:
        return line
    kind = REGISTRY[row.name]
    fresh = replace(
        row,
        about=kind.about,
        served=served_text(kind.promise),
        recovered=recovered_text(kind.promise),
        measured=figures.get(row.name, row.measured),
    )
    return str(fresh)


def main() -> None:
    results = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    PAGE.write_text(with_figures(PAGE.read_text(), measured(results)))


if __name__ == "__main__":
    main()
