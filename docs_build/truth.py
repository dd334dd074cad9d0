"""`make truth`: result pages from committed records; with CHECK=1 it compares instead of writing.

A page is the template of its name in `docs_build/truth_pages`, filled in from the records in
`docs/results/*.json` (see `catenaryd/scenarios/record.py`) and `docs/benchmarks.json`. A page holds
no age, as every commit would change it: it names commit and date, `make truth` prints the ages, and
the site adds them when it is built.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from benchmarks.__main__ import MODULES
from benchmarks.figures import Figure
from catenaryd.live.scenario import SAFETY_MARGIN_MS
from catenaryd.scenarios.planners import OWN_MARGIN
from catenaryd.scenarios.record import picture_digest, report_of, sealed, settings_of
from catenaryd.scenarios.schema import Sensitivity
from scheduler.settings import SchedulerSettings
from services.domain.ids import NANOSECONDS_PER_MILLISECOND
from simulator.options import SIMULATED

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).parent / "truth_pages"
OLD_COMMITS = 200
"""A record of real processes older than this is named as old; it fails nothing."""
BY_HAND = {"docs/results/gpu.md": "predictions and procedures: nothing on it was measured"}
UNRENDERED = {
    "live-steps": "its table was four runs with other settings; no record of them is left"
}
"""Scenarios without a record, and why."""
_EXCERPT = (
    "its trace was cut to the stretch it replays, in tests/data; served live, so not run again"
)
OTHER_SETTINGS = {"table-1-live": _EXCERPT, "table-1-live-shared": _EXCERPT}
"""Records of other settings than their scenario's file has today, and why; the keys are names."""

UNMEASURED: dict[str, str] = {}
"""Benches without a record, and why."""

Record = Mapping[str, Any]


def records(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Returns every committed record by its scenario's name."""
    return {
        path.stem: json.loads(path.read_text("utf-8"))
        for path in sorted((root / "docs/results").glob("*.json"))
    }


def scenarios(root: Path = ROOT) -> dict[str, Path]:
    """Returns every scenario's file by its name."""
    return {path.stem: path for path in sorted((root / "scenarios").rglob("*.yaml"))}


def benches(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Returns every committed record of a bench by its name."""
    found: dict[str, dict[str, Any]] = json.loads(
        (root / "docs/benchmarks.json").read_text("utf-8")
    )
    return found


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Returns what each page has to be, by its path below the root."""
    found, files = records(root), scenarios(root)
    measured = benches(root)

    def section(name: str) -> str:
        return "\n".join(
            [
                f"<!-- begin generated: {name} -->\n",
                report_of(name, found[name]).markdown().strip(),
                f"\n{origin(found[name], files[name].relative_to(root).as_posix())}\n",
                f"<!-- end generated: {name} -->",
            ]
        )

    def cell(name: str, table: int, row: str, column: str) -> float:
        return _number(_cell(found[name]["page"]["tables"][table], row, column))

    def column(
        name: str, table: int, column: str, rows: str = "", *, reference: bool = False
    ) -> list[float]:
        return _column(found[name]["page"]["tables"][table], column, rows, reference)

    def times(name: str, table: int, ours: str, theirs: str, rows: str = "") -> list[float]:
        return _ratios(column(name, table, ours, rows), column(name, table, theirs, rows))

    def saved(name: str, table: int, ours: str, theirs: str, rows: str = "") -> list[float]:
        return [1 - each for each in times(name, table, ours, theirs, rows)]

    def bench(name: str) -> str:
        return _bench(measured[name])

    def figure(name: str, text: str) -> float:
        return float(next(e["value"] for e in measured[name]["figures"] if e["name"] == text))

    environment = SandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    environment.filters.update(_FILTERS)
    shared = {
        "section": section, "bench": bench, "figure": figure, "facts": found,
        "cell": cell, "column": column, "times": times, "saved": saved,
        "ratios": _ratios, "less": _less, "differences": _differences, "pick": _pick,
    }  # fmt: skip
    made = {}
    for template in sorted(TEMPLATES.glob("*.md")):
        place = Path("docs") / ("" if template.stem == "benchmarks" else "results") / template.name
        text = template.read_text("utf-8")
        made[place] = environment.from_string(text, globals=shared).render()
    return made


def problems(root: Path = ROOT) -> Iterator[str]:
    """Yields what does not agree, a line each: pages, records, scenarios, exceptions."""
    made, found, files, measured = pages(root), records(root), scenarios(root), benches(root)
    yield from _of_pages(made, root)
    for name, record in [*found.items(), *measured.items()]:
        if record["settings"].get("quick"):
            yield f"the record of {name} is of a short form"
        if sealed(record) != record:
            yield f"the record of {name} is not what its run wrote: its digest differs"
    for name, record in found.items():
        yield from _of_record(name, record, files, root)
        if not any(f"begin generated: {name} -->" in text for text in made.values()):
            yield f"the record of {name} is on no page"
    yield from _without(files.keys(), found.keys(), UNRENDERED, "UNRENDERED")
    yield from _without(set(MODULES), measured.keys(), UNMEASURED, "UNMEASURED")


def _of_pages(made: Mapping[Path, str], root: Path) -> Iterator[str]:
    for place, text in made.items():
        if (root / place).read_text("utf-8") != text:
            yield f"{place} is not what its records render: {_first_difference(root / place, text)}"
    for path in sorted((root / "docs/results").glob("*.md")):
        place = path.relative_to(root)
        if place not in made and place.as_posix() not in BY_HAND:
            yield f"{place} has no template in docs_build/truth_pages"


def _without(
    wanted: AbstractSet[str], there: AbstractSet[str], excepted: Mapping[str, str], table: str
) -> Iterator[str]:  # fmt: skip
    for name in sorted(wanted - there - excepted.keys()):
        yield f"{name} has no record"
    for name in sorted(excepted.keys() & there):
        yield f"{table} names {name}, which has a record"


def _of_record(
    name: str, record: Record, files: Mapping[str, Path], root: Path
) -> Iterator[str]:  # fmt: skip
    if name not in files:
        yield f"the record of {name} has no scenario"
        return
    same = settings_of(files[name]) == record["settings"]
    if same and name in OTHER_SETTINGS:
        yield f"OTHER_SETTINGS names {name}, whose settings are its scenario's"
    if not same and name not in OTHER_SETTINGS:
        yield f"the settings of {name} are not its record's: run it again"
    for picture in record["page"]["pictures"]:
        if picture_digest(root / "docs/results", picture["name"]) != picture["sha256"]:
            yield f"picture {picture['name']}.png is not that of the record"


def origin(record: Record, scenario: str) -> str:
    """Returns the line below a section: code, date, machine, settings and what is not default."""
    unlike = unlike_deployment(scenario, record["settings"])
    told = f" Not a deployment's default: {', '.join(unlike)}." if unlike else ""
    return f"*`{scenario}` {_made(record['made'])}.{told}*"


def _made(made: Mapping[str, str]) -> str:
    history = "" if made["from"] == "the run" else f" ({made['from']})"
    dirty = " with changes" if made["commit"].endswith("+") else ""
    return f"at commit {made['commit'][:10]}{dirty}, {made['date']}, {made['machine']}{history}"


def unlike_deployment(scenario: str, settings: Mapping[str, Any]) -> list[str]:
    """Returns where a scenario's settings are not what a scheduler does by default, in words."""
    used: dict[str, list[Any]] = {}
    family, kind = Path(scenario).parent.name, settings["kind"]
    chosen = [*settings.get("systems", []), *settings.get("policies", [])]
    if family == "scenarios" and kind != "planner_scaling":
        ours = [e for e in chosen if e.get("planner", "catenary") == "catenary"]
        used["plan_margin"] = [each.get("margin", OWN_MARGIN) for each in ours] or [OWN_MARGIN]
        if kind == "sensitivity":
            margin = Sensitivity.model_fields["margin"].default
            varied = settings["vary"] == "margin"
            used["plan_margin"] = settings["values"] if varied else [settings.get("margin", margin)]
        used["max_linger_ms"] = [float("inf")]
        simulated_ms = SIMULATED.safety_margin_ns / NANOSECONDS_PER_MILLISECOND
        used["safety_margin_ms"] = [SAFETY_MARGIN_MS if kind == "live" else simulated_ms]
    elif family == "chains" and kind not in ("placement", "allocation"):
        used["chain_policy"] = [
            e if isinstance(e, str) else e.get("policy", "jffc") for e in chosen
        ]
        used["chain_policy"] = used["chain_policy"] or ["jffc"]
    elif family == "placement":
        used["chain_policy"] = ["slo"]
    elif family == "packing":
        used["packing"] = ["off" if kind == "live" else "pack"]
    for name, value in settings.get("scheduler", {}).items():
        used[name] = [value]
    return list(_unlike(used))


def _unlike(used: Mapping[str, list[Any]]) -> Iterator[str]:
    for name, values in used.items():
        default = SchedulerSettings.model_fields[name].default
        other = [f"{each:g}" if isinstance(each, float) else str(each) for each in values]
        if any(each != default for each in values):
            yield f"`{name}` {' / '.join(dict.fromkeys(other))} (default {default})"


def ages(root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Yields the age in commits and the name of every record, where history tells it."""
    for name, record in [*records(root).items(), *benches(root).items()]:
        age = age_of(record["made"]["commit"].rstrip("+"), root)
        if age is not None:
            yield age, name


@cache
def age_of(commit: str, root: Path = ROOT) -> int | None:
    """Returns how many commits HEAD has that a commit has not; None if it is not known here."""
    asked = ["git", "-C", str(root), "rev-list", "--count", f"{commit}..HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def aged(text: str) -> str:
    """Returns a page with the age in commits behind every commit of a record, where it is known."""

    def with_age(found: re.Match[str]) -> str:
        age = age_of(found[1])
        return found[0] if age is None else f"{found[0]} ({age} commits ago)"

    return re.sub(r"at commit ([0-9a-f]{10})\b", with_age, text)


def _bench(record: Record) -> str:
    lines = ["| figure | measured | limit |", "|---|---:|---:|"]
    lines += [_bench_line(each) for each in record["figures"]]
    made = record["made"]
    return "\n".join([*lines, "", f"*Measured {_made(made)}.*"])


def _bench_line(figure: Figure) -> str:
    number = figure["value"]
    digits = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
    value = f"{digits} {figure['unit']}".strip()
    limit = "-" if figure["limit"] is None else f"{figure['limit']:g}"
    return f"| {figure['name']} | {value if figure['ok'] else f'**{value}**'} | {limit} |"


def _cell(table: Mapping[str, Any], row: str, column: str) -> str | float:
    place = table["header"].index(column)
    found: str | float = next(
        each[place] for each in table["rows"] if row in (each[0], f"{each[0]} {each[1]}")
    )
    return found


def _column(
    table: Mapping[str, Any], column: str, rows: str, reference: bool
) -> list[float]:  # fmt: skip
    """Numbers of a column; `rows` is sought in the rows' names; or of the reference below them."""
    place, found = table["header"].index(column), []
    for number, row in enumerate(table["rows"]):
        below = table["rows"][number + 1] if number + 1 < len(table["rows"]) else [""]
        named = re.search(rows, row[0]) or re.search(rows, f"{row[0]} {row[1]}")
        if row[0] != "- reference" and named:
            if not reference:
                found.append(_number(row[place]))
            elif below[0] == "- reference":
                found.append(_number(below[place]))
    return found


def _pick(entries: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The first entry of facts that says what is wanted."""
    return next(
        each for each in entries if all(each[key] == value for key, value in wanted.items())
    )


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True) if other]


def _less(ours: list[float], theirs: list[float]) -> list[float]:
    """By what share ours are less than theirs."""
    return [1 - each for each in _ratios(ours, theirs)]


def _differences(ours: list[float], theirs: list[float]) -> list[float]:
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def _span(values: list[float], digits: int) -> str:
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return least if least == most else f"{least} to {most}"


def _number(cell: str | float) -> float:
    """The number a cell begins with; of 34 % it is 0.34."""
    if not isinstance(cell, str):
        return cell
    found = re.match(r"([-+]?\d+(?:\.\d+)?)( ?%)?", cell)
    if found is None:
        raise ValueError(f"{cell!r} begins with no number")
    return float(found[1]) / (100 if found[2] else 1)


_FILTERS: Mapping[str, Callable[..., Any]] = {
    "n": lambda value, digits=0: f"{value:.{digits}f}",
    "percent": lambda value, digits=0: f"{100 * value:.{digits}f}",
    "range": lambda values, digits=0: _span(values, digits),
    "percents": lambda values, digits=0: _span([100 * each for each in values], digits),
    "sizes": lambda values: [abs(each) for each in values],
    "mean": lambda values: sum(values) / len(values),
}


def _first_difference(path: Path, text: str) -> str:
    lines, wanted = path.read_text("utf-8").splitlines(), text.splitlines()
    for number, (line, other) in enumerate(zip(lines, wanted, strict=False), 1):
        if line != other:
            return f"line {number} is {line[:80]!r}, not {other[:80]!r}"
    return f"{len(lines)} lines, not {len(wanted)}"


def main(check: bool) -> int:
    """Writes or compares every page, prints what is wrong and how old records are."""
    if not check:
        for place, text in pages().items():
            (ROOT / place).write_text(text, "utf-8")
    found = list(problems())
    for line in found:
        print(line)
    old = sorted(ages(), reverse=True)
    if old:
        print("commits old:", ", ".join(f"{name} {age}" for age, name in old))
        print(f"older than {OLD_COMMITS}:", sum(age > OLD_COMMITS for age, _ in old))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
