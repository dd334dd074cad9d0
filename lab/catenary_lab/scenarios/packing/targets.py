"""Limits that a policy has to keep relative to others, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.packing.facts import (
    MEASURES,
    Facts,
    facts_of,
    mean_of,
    seeds_note,
    table,
    violations_of,
)
from catenary_lab.scenarios.packing.schema import Targets
from catenary_lab.scenarios.packing.schema_parts import LimitSpec
from catenary_lab.scenarios.packing.settings import case_of, rows_of
from catenary_lab.scenarios.report import Cell, Findings, Table

_TABLES = ("gpus_mean", "gpus_peak", "utilisation", "migrations_per_s", "preemptions_per_s")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one limit in one case.

    Attributes:
        case: Kind of GPU and workload.
        measure: Name of the figure.
        ours: Figure of the policy that has to keep the limit.
        beside: Label of the other policy.
        theirs: Figure of the other policy.
        ratio: The ratio `ours` / `theirs`; None if `theirs` is 0.
        at_most: The limit of the ratio.
        met: Whether the limit is kept.
    """

    case: str
    measure: str
    ours: float
    beside: str
    theirs: float
    ratio: float | None
    at_most: float
    met: bool


def report(scenario: Targets, results: Results) -> Findings:
    """Returns every limit with its verdict, the figures behind them, and facts."""
    facts = facts_of(rows_of(scenario), results)
    verdicts = [
        _verdict(scenario, facts, limit, case_of(gpu, workload))
        for limit in scenario.limits
        for gpu in scenario.gpus
        for workload in limit.workloads
    ]
    met = sum(each.met for each in verdicts)
    tables = (
        _table(scenario, verdicts),
        *(table(scenario, facts, key) for key in _TABLES),
    )
    notes = (
        f"{met} of {len(verdicts)} targets are met. {seeds_note(scenario)} Violated invariants: "
        f"{violations_of(facts)}.",
    )
    found = {
        "met": met == len(verdicts),
        "targets": [asdict(each) for each in verdicts],
        "policies": facts,
    }
    return Findings(tables, (), notes, found)


def _verdict(scenario: Targets, facts: Sequence[Facts], limit: LimitSpec, case: str) -> Verdict:
    ours = mean_of(facts, limit.measure, case, scenario.policy)
    theirs = mean_of(facts, limit.measure, case, limit.beside)
    assert ours is not None  # every run has these figures
    assert theirs is not None
    ratio = ours / theirs if theirs else None
    met = ours <= limit.at_most * theirs
    return Verdict(case, limit.measure, ours, limit.beside, theirs, ratio, limit.at_most, met)


def _table(scenario: Targets, verdicts: Sequence[Verdict]) -> Table:
    header = ("", "figure", scenario.policy, "beside", "its figure", "ratio", "limit", "")
    rows: list[tuple[Cell, ...]] = [
        (
            each.case,
            MEASURES[each.measure].caption,
            f"{each.ours:.2f}",
            each.beside,
            f"{each.theirs:.2f}",
            None if each.ratio is None else f"{each.ratio:.3f}",
            f"{each.at_most:g}",
            "pass" if each.met else "FAIL",
        )
        for each in verdicts
    ]
    return Table(f"What {scenario.policy} has to reach", header, tuple(rows))
