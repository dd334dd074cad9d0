"""Result pages rendered from committed records (`make truth`), or compared with them (CHECK=1).

A page is the template of its name in `docs_build/truth_pages`, filled in from the records in
`docs/results/*.json` (see `lab/catenary_lab/scenarios/record.py`), `docs/benchmarks.json` and
`docs/peers.json`. A page holds no age, because every commit would change it. It names commit and
date, `make truth` prints the ages, and the site adds them when it is built.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.__main__ import MODULES
from catenary_lab.limits import Figure
from catenary_lab.scenarios.figures import ENVIRONMENT, WORDS, Figures, judged
from catenary_lab.scenarios.record import picture_digest, report_of, sealed, settings_of
from catenary_lab.scenarios.schema import expectations_of
from docs_build.gpu_days import days
from docs_build.peers import peers_page
from docs_build.truth_settings import named_today, unlike_deployment

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).parent / "truth_pages"
OLD_COMMITS = 200
"""A record of real processes with more commits than this behind it is reported as old, which is no
failure."""
UNRENDERED: dict[str, str] = {
    "shared-beginnings": "to be recorded, and rendered beside the other scenarios of placement",
}
"""Scenarios without a record, with the reason."""
OTHER_SETTINGS: dict[str, str] = {}
"""Records whose settings differ from today's scenario file, with the reason."""
MISSED = {
    "load-factors: load factor, PPipe's plans": "so does the artifact, under the same plans",
    "load-factors-bursty: cv 4: over NP": "bursts are longer than the SLO, and pooling helps less",
    "reservation: reservation over reactive": "our reactive baseline beats the artifact's",
    "tuning: regret of c* by lower bound, worst load": "at the highest load alone",
}
"""Limits of scenarios that their records miss, with the reason; pages show them in bold."""

_LONG = "its long form took over 200 s on a busy machine; not run since records began"
UNMEASURED = {
    "sampling": _LONG,
    "migration": _LONG,
    "engines": "to be recorded: runs before sessions had places side by side missed limits",
    "beside": "to be recorded on a quiet machine",
    "prefix": "to be recorded on a quiet machine",
}
"""Benches without a record, with the reason."""

Record = Mapping[str, Any]


def records(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Returns every committed record by its scenario's name."""
    return {
        path.stem: json.loads(path.read_text("utf-8"))
        for path in sorted((root / "docs/results").glob("*.json"))
    }


def scenarios(root: Path = ROOT) -> dict[str, Path]:
    """Returns the file of every scenario by its name."""
    return {path.stem: path for path in sorted((root / "scenarios").rglob("*.yaml"))}


def benches(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Returns every committed record of a bench by its name."""
    found: dict[str, dict[str, Any]] = json.loads(
        (root / "docs/benchmarks.json").read_text("utf-8")
    )
    return found


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Returns the text that each page must have, by its path below the root."""
    found, files = records(root), scenarios(root)
    measured = benches(root)

    def section(name: str) -> str:
        parts = [report_of(name, found[name]).markdown().strip()]
        if limits := _limits(name, found[name], files[name]):
            parts.append(f"**Limits** (bold: missed)\n\n{_table(limits)}")
        parts.append(origin(found[name], files[name].relative_to(root).as_posix()))
        content = "\n\n".join(parts)
        return f"<!-- begin generated: {name} -->\n\n{content}\n\n<!-- end generated: {name} -->"

    def of_record(word: str, name: str, *names: Any, **named: Any) -> Any:
        figures = Figures(report_of(name, found[name]).tables, found[name])
        return getattr(figures, word)(*names, **named)

    def bench(name: str) -> str:
        record = measured[name]
        return f"{_table(record['figures'])}\n\n*Measured {_made(record['made'])}.*"

    def figure(name: str, text: str) -> float:
        return float(next(e["value"] for e in measured[name]["figures"] if e["name"] == text))

    shared: dict[str, Any] = {"section": section, "bench": bench, "figure": figure, "facts": found}
    shared["days"] = days(root)
    if (compared := peers_page(root)) is not None:
        told = f"{compared.how} Measured {_made(compared.record['made'])}."
        shared |= {"peer_targets": _table(compared.figures), "peer_origin": f"*{told}*"}
    shared["peers"] = compared
    shared |= {word: partial(of_record, word) for word in WORDS}
    texts = {}
    for template in sorted(TEMPLATES.glob("*.md")):
        place = Path("docs") / ("" if template.stem == "benchmarks" else "results") / template.name
        text = template.read_text("utf-8")
        texts[place] = ENVIRONMENT.from_string(text, globals=shared).render()
    return texts


def problems(root: Path = ROOT) -> Iterator[str]:
    """Yields a line for each disagreement among pages, records, scenarios and exceptions."""
    made, found, files, measured = pages(root), records(root), scenarios(root), benches(root)
    yield from _of_pages(made, root)
    for name, record in everything(root).items():
        if record["settings"].get("quick"):
            yield f"the record of {name} is of a short form"
        if sealed(record) != record:
            yield f"the record of {name} is not what its run wrote: its digest differs"
    missed = dict(_missed(found, files))
    yield from (f"missed: {text}" for name, text in missed.items() if name not in MISSED)
    kept = sorted(MISSED.keys() - missed.keys())
    yield from (f"MISSED names {name}, which is not missed" for name in kept)
    for name, record in found.items():
        yield from _of_record(name, record, files, root)
        if not any(f"begin generated: {name} -->" in text for text in made.values()):
            yield f"the record of {name} is on no page"
    yield from _without(files.keys(), found.keys(), UNRENDERED, "UNRENDERED")
    yield from _without(set(MODULES), measured.keys(), UNMEASURED, "UNMEASURED")


def _missed(found: Mapping[str, Record], files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yields each limit that a record misses, by scenario and name, with a line about it."""
    for scenario in sorted(found.keys() & files.keys()):
        for each in _limits(scenario, found[scenario], files[scenario]):
            if not each["ok"]:
                name = f"{scenario}: {each['name']}"
                yield name, f"{name} is {each['value']:.4g}, the limit {each['limit']:g}"


def _of_pages(made: Mapping[Path, str], root: Path) -> Iterator[str]:
    for place, text in made.items():
        if (root / place).read_text("utf-8") != text:
            yield f"{place} is not what its records render: {_first_difference(root / place, text)}"
    for path in sorted((root / "docs/results").glob("*.md")):
        place = path.relative_to(root)
        if place not in made:
            yield f"{place} has no template in docs_build/truth_pages"


def _without(
    wanted: AbstractSet[str], there: AbstractSet[str], excepted: Mapping[str, str], table: str
) -> Iterator[str]:
    for name in sorted(wanted - there - excepted.keys()):
        yield f"{name} has no record"
    for name in sorted(excepted.keys() & there):
        yield f"{table} names {name}, which has a record"


def _of_record(name: str, record: Record, files: Mapping[str, Path], root: Path) -> Iterator[str]:
    if name not in files:
        yield f"the record of {name} has no scenario"
        return
    same = settings_of(files[name]) == named_today(record["settings"])
    if same and name in OTHER_SETTINGS:
        yield f"OTHER_SETTINGS names {name}, whose settings are its scenario's"
    if not same and name not in OTHER_SETTINGS:
        yield f"the settings of {name} are not its record's: run it again"
    for picture in record["page"]["pictures"]:
        if picture_digest(root / "docs/results", picture["name"]) != picture["sha256"]:
            yield f"picture {picture['name']}.png is not that of the record"


def origin(record: Record, scenario: str) -> str:
    """Returns the line below a section: code, date, machine, and settings that are no default."""
    unlike = unlike_deployment(scenario, record["settings"])
    told = f" Not a deployment's default: {', '.join(unlike)}." if unlike else ""
    return f"*`{scenario}` {_made(record['made'])}.{told}*"


def _made(made: Mapping[str, str]) -> str:
    history = "" if made["from"] == "the run" else f" ({made['from']})"
    dirty = " with changes" if made["commit"].endswith("+") else ""
    return f"at commit {made['commit'][:10]}{dirty}, {made['date']}, {made['machine']}{history}"


def ages(root: Path = ROOT) -> dict[str, int]:
    """Returns how many commits old each record is, where the history tells it."""
    found = {name: age_of(_commit(each), root) for name, each in everything(root).items()}
    return {name: age for name, age in found.items() if age is not None}


def everything(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Returns records of scenarios by name, and others as `bench NAME`, `GPU NAME` and `peers`."""
    of_benches = {f"bench {name}": each for name, each in benches(root).items()}
    of_days = {f"GPU {name}": day.record for name, day in days(root).items()}
    compared = peers_page(root)
    of_peers = {"peers": compared.record} if compared is not None else {}
    return records(root) | of_benches | of_days | of_peers


def _commit(record: Record) -> str:
    return str(record["made"]["commit"]).rstrip("+")


def is_timed(record: Record) -> bool:
    """Returns True for a record of real processes or times, which files do not determine."""
    settings = record["settings"]
    kinds = ("live", "live_plans", "overhead", "planner_scaling", "gpu", "peers")
    timed = settings.get("kind") in kinds
    return "figures" in record or "live" in settings or timed


@cache
def age_of(commit: str, root: Path = ROOT) -> int | None:
    """Returns how many commits HEAD has that a commit lacks; None if the commit is unknown here."""
    asked = ["git", "-C", str(root), "rev-list", "--count", f"{commit}..HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def aged(text: str) -> str:
    """Returns a page with the age of every record, in commits, where it is known."""

    def with_age(found: re.Match[str]) -> str:
        age = age_of(found[1])
        return found[0] if age is None else f"{found[0]} ({age} commits ago)"

    return re.sub(r"at commit ([0-9a-f]{10})\b", with_age, text)


def _limits(name: str, record: Record, scenario: Path) -> list[Figure]:
    """Returns what a scenario expects of its run beside what the record holds."""
    return judged(expectations_of(scenario), report_of(name, record).tables, record)


def _table(figures: Sequence[Figure]) -> str:
    lines = ["| figure | measured | limit |", "|---|---:|---:|"]
    return "\n".join([*lines, *(_bench_line(each) for each in figures)])


def _bench_line(figure: Figure) -> str:
    number = figure["value"]
    digits = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
    value = f"{digits} {figure['unit']}".strip()
    limit = "-" if figure["limit"] is None else f"{figure['limit']:g}"
    name = re.sub("^  ", "- ", figure["name"]).strip()
    return f"| {name} | {value if figure['ok'] else f'**{value}**'} | {limit} |"


def _first_difference(path: Path, text: str) -> str:
    lines, wanted = path.read_text("utf-8").splitlines(), text.splitlines()
    for number, (line, other) in enumerate(zip(lines, wanted, strict=False), 1):
        if line != other:
            return f"line {number} is {line[:80]!r}, not {other[:80]!r}"
    return f"{len(lines)} lines, not {len(wanted)}"


def main(check: bool) -> int:
    """Writes or compares every page; prints disagreements and the ages of records."""
    if not check:
        for place, text in pages().items():
            (ROOT / place).write_text(text, "utf-8")
    found = list(problems())
    for line in found:
        print(line)
    print("limits missed:", "; ".join(f"{name} ({why})" for name, why in MISSED.items()))
    old = ages()
    print("commits old:", ", ".join(f"{name} {age}" for name, age in sorted(old.items())))
    timed = [name for name, record in everything().items() if is_timed(record)]
    if stale := [name for name in timed if old.get(name, 0) > OLD_COMMITS]:
        print(f"measured more than {OLD_COMMITS} commits ago, to be run again: {', '.join(stale)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
