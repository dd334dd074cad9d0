"""GPUs, utilisation and moves where a GPU is started whenever none has room: Fig. 11 to 14."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.packing.facts import (
    Facts,
    bars,
    facts_of,
    seeds_note,
    table,
    violations_of,
)
from catenary_lab.scenarios.packing.schema import Fleet
from catenary_lab.scenarios.packing.settings import PackingJob, cases_of, jobs_of, rows_of
from catenary_lab.scenarios.report import Cell, Findings, Table

_TABLES = {"decisions": ("decision_p50_us", "decision_p99_us")}


def jobs(scenario: Fleet) -> list[PackingJob]:
    """Returns all runs."""
    return jobs_of(scenario, timed=_timed(scenario))


def report(scenario: Fleet, results: Results) -> Findings:
    """Returns a table per measure, plots and facts."""
    facts = facts_of(rows_of(scenario, timed=_timed(scenario)), results)
    tables: list[Table] = []
    panels = []
    for measure in scenario.measures:
        if measure == "transfers":
            tables.append(_transfers(scenario, facts))
            continue
        keys = _TABLES.get(measure, (measure,))
        tables += [table(scenario, facts, key) for key in keys]
        panels += [bars(scenario, facts, keys[0], gpu) for gpu in scenario.gpus]
    notes = (f"{seeds_note(scenario)} Violated invariants: {violations_of(facts)}.",)
    return Findings(tuple(tables), tuple(panels), notes, {"policies": facts})


def _timed(scenario: Fleet) -> bool:
    return "decisions" in scenario.measures


def _transfers(scenario: Fleet, facts: Sequence[Facts]) -> Table:
    """Returns how the moves of every policy that moves were divided."""
    header = (
        "",
        "policy",
        "as caches",
        "as tokens",
        "not needed any more",
        "further epochs, per move",
        "epochs waited, per move",
        "caches, GB/s",
        "tokens read again, per s",
    )
    rows: list[tuple[Cell, ...]] = []
    for case in cases_of(scenario):
        for policy in scenario.policies:
            row = _divided(scenario, facts, case, policy.label)
            if row is not None:
                rows.append((case, policy.label, *row))
    return Table("Moves by the way they went", header, tuple(rows))


def _divided(
    scenario: Fleet, facts: Sequence[Facts], case: str, label: str
) -> tuple[Cell, ...] | None:
    tallies = [
        each["transfers"]
        for each in facts
        if each["policy"] == label
        and f"{each['gpu']}, {each['workload']}" == case
        and "transfers" in each
    ]
    sums = {key: sum(each[key] for each in tallies) for key in (tallies[0] if tallies else ())}
    moves = sum(sums.get(key, 0) for key in ("kv", "tokens", "dropped"))
    if not moves:
        return None
    seconds = scenario.duration_s * len(tallies)
    shares = (f"{100 * sums[key] / moves:.1f} %" for key in ("kv", "tokens", "dropped"))
    return (
        *shares,
        f"{sums['carried'] / moves:.2f}",
        f"{sums['deferred'] / moves:.2f}",
        f"{sums['kv_bytes'] / seconds / 1e9:.2f}",
        f"{sums['tokens_read'] / seconds:.0f}",
    )
