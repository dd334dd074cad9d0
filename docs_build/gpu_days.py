"""Records of GPU days, and what the page about them shows of them.

    python -m docs_build.gpu_days NAME COMMIT CARD FOLDER..

makes `docs/results/gpu/NAME.json` of what the programs in `benchmarks/gpu` wrote into some folders;
COMMIT is the commit of the code that ran there, CARD the name of the GPU. A stage that ran more
than once is kept from the last folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from catenary_lab.scenarios.record import sealed, text_of

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("docs/results/gpu")
NOT_RUN = "not run"


class GpuDay:
    """The record of one run of the programs on a machine with a GPU."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self._rows = {
            (stage["name"], row["name"]): row
            for stages in record["programs"].values()
            for stage in stages
            for row in stage["rows"]
        }

    @property
    def origin(self) -> str:
        """The line below a table: code, date and card."""
        made = self.record["made"]
        return f"*At commit {made['commit'][:10]}, {made['date']}, {made['machine']}.*"

    def value(self, stage: str, name: str) -> float:
        """Returns a number that a stage measured."""
        return float(self._rows[stage, name]["value"])

    def part(self, stage: str, name: str) -> str:
        """Returns what a stage noted first beside a number, such as a time; "-" without."""
        row = self._rows.get((stage, name), {})
        return str(row.get("note", "-")).split(",")[0]

    def table(self, stage: str, part: str = "") -> str:
        """Returns a table of the rows of a stage whose names contain a text."""
        lines = ["| figure | measured | note |", "|---|---:|---|"]
        for (of, name), row in self._rows.items():
            if of == stage and part in name:
                value = row["value"]
                number = value if isinstance(value, str) else f"{value:,.4g}"
                lines.append(f"| {name} | {number} {row.get('unit', '')} | {row.get('note', '')} |")
        return "\n".join(lines)


def days(root: Path = ROOT) -> dict[str, GpuDay]:
    """Returns the record of every GPU day by its name, oldest first."""
    files = sorted((root / FOLDER).glob("*.json"))
    return {path.stem: GpuDay(json.loads(path.read_text("utf-8"))) for path in files}


def record_of(commit: str, card: str, folders: list[Path]) -> dict[str, Any]:
    """Returns the record of what programs wrote into some folders; later ones take precedence."""
    programs: dict[str, dict[str, Any]] = {}
    for document in _documents(folders):
        stages = programs.setdefault(document["program"], {})
        for stage in document["stages"]:
            if stage["verdict"] != NOT_RUN or stage["name"] not in stages:
                stages[stage["name"]] = stage
    found = {name: list(stages.values()) for name, stages in programs.items()}
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    made = {"commit": commit, "date": date, "machine": card, "from": "the run"}
    return sealed({"programs": found, "settings": {"kind": "gpu"}, "made": made})


def _documents(folders: list[Path]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for file in sorted(folder.rglob("*.json")):
            yield json.loads(file.read_text("utf-8"))


def main() -> None:
    """Writes the record that the command line names."""
    name, commit, card, *folders = sys.argv[1:]
    record = record_of(commit, card, [Path(folder) for folder in folders])
    target = ROOT / FOLDER / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text_of(record), "utf-8")


if __name__ == "__main__":
    main()
