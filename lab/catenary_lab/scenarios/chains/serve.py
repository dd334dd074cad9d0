"""Whole systems on whole workloads: Fig. 8 and Table 1."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from catenary_lab.chains.baselines import KnownEnds
from catenary_lab.scenarios.cells import known_mean, rounded
from catenary_lab.scenarios.chains.jobs import Outcome, SystemJob
from catenary_lab.scenarios.chains.schema import Serve
from catenary_lab.scenarios.chains.schema_parts import System, WorkloadSpec
from catenary_lab.scenarios.chains.settings import Case, cases_of, requests_of
from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.report import Bars, Cell, Findings, Table
from catenary_simulator.chains.result import together

_LOGARITHMIC = 20.0
"""Bars whose heights differ by more than this factor stand on a logarithmic axis."""
_MOST_DETAILED = 45
"""Number of runs of which a table tells quantiles; of more it would be too long to read."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: one case and workload."""

    label: str
    case: Case
    workload: WorkloadSpec

    def jobs(self, system: System) -> list[SystemJob]:
        """Returns one run per topology or seed."""
        return [
            SystemJob(setting, requests_of(self.workload, seed), system)
            for setting, seed in zip(self.case.settings, self.case.seeds, strict=True)
        ]


def rows(scenario: Serve) -> Iterator[Row]:
    """Yields every case with every workload."""
    for workload in scenario.workloads:
        for case in cases_of(scenario, scenario.seeds, workload.compute_factor):
            yield Row(", ".join(filter(None, (workload.label, case.label))), case, workload)


def jobs(scenario: Serve) -> Iterator[SystemJob]:
    """Yields all runs."""
    for row in rows(scenario):
        for system in scenario.systems:
            yield from row.jobs(system)


def report(scenario: Serve, results: Results) -> Findings:
    """Returns tables and facts."""
    found = [
        (row, system, [results[job] for job in row.jobs(system)])
        for row in rows(scenario)
        for system in scenario.systems
    ]
    facts = [facts_of(row, system, outcomes) for row, system, outcomes in found]
    by_row: dict[str, list[dict[str, Any]]] = {}
    for fact in facts:
        by_row.setdefault(fact["case"], []).append(fact)
    tables = [
        _responses(scenario, by_row),
        _gains(scenario, by_row, "true", ""),
        _gains(scenario, by_row, "expected", " against rivals that route by expected ends"),
    ]
    if len(by_row) * len(scenario.systems) <= _MOST_DETAILED:
        tables.append(_details(facts))
    runs = len(next(iter(rows(scenario))).case.settings)
    per_run = "; ".join(
        dict.fromkeys(f"{each.requests} requests per run" for each in scenario.workloads)
    )
    notes = (f"{per_run}; means over {runs} run{'s' if runs > 1 else ''}.",)
    return Findings(
        tuple(table for table in tables if table is not None),
        _panels(scenario, by_row),
        notes,
        {"policies": facts},
    )


def facts_of(row: Row, system: System, outcomes: list[Outcome]) -> dict[str, Any]:
    """Returns the figures of one system on one row: means of runs, quantiles of all requests."""
    served = [each.result for each in outcomes if each.result is not None]
    means = [each.mean_response_s for each in outcomes if each.mean_response_s is not None]
    chosen = [each.c for each in outcomes if each.c is not None]
    bounds = [each.bounds for each in outcomes if each.bounds is not None]
    facts: dict[str, Any] = {
        "case": row.label,
        "label": system.label,
        "policy": system.policy if system.planner == "catenary" else system.planner,
        "planner": system.planner,
        "runs": len(outcomes),
        "placed_runs": len(served),
        "c": statistics.median(chosen) if chosen else None,
        "c_of_runs": chosen,
        "capacity": known_mean(each.capacity for each in outcomes if each.capacity),
        "bounds": {
            "response_lower_s": known_mean(each.response_lower_s for each in bounds),
            "response_upper_s": known_mean(each.response_upper_s for each in bounds),
            "load": known_mean(each.load for each in bounds),
        }
        if bounds
        else None,
    }
    if served:
        facts |= together(served).to_json()
    facts["mean_response_s"] = known_mean(means) if len(means) == len(outcomes) else None
    facts["mean_response_s_of_runs"] = means
    return facts


def _responses(scenario: Serve, by_row: Mapping[str, list[dict[str, Any]]]) -> Table:
    labels = [system.label for system in scenario.systems]
    lines: list[tuple[Cell, ...]] = []
    for label, facts in by_row.items():
        cells: list[Cell] = []
        for fact in facts:
            mean = fact["mean_response_s"]
            c = f" (c {fact['c']:g})" if fact["c"] is not None else ""
            cells.append("not placeable" if mean is None else f"{mean:.2f}{c}")
        lines.append((label, *cells))
        expected = scenario.expected.get(label, {})
        if expected:
            lines.append(("- reference", *(rounded(expected.get(each)) for each in labels)))
    return Table("Mean response in s (median of the chosen c)", ("", *labels), tuple(lines))


def _gains(
    scenario: Serve, by_row: Mapping[str, list[dict[str, Any]]], ends: KnownEnds, against: str
) -> Table | None:
    """Returns by how much our systems are faster than the baselines that route by such ends."""
    ours = [each.label for each in scenario.systems if each.planner == "catenary"]
    theirs = [
        each.label for each in scenario.systems if each.planner != "catenary" and each.ends == ends
    ]
    if not ours or not theirs:
        return None
    header = ("", *(f"{mine} vs {other}" for mine in ours for other in theirs))
    lines: list[tuple[Cell, ...]] = []
    for label, facts in by_row.items():
        means = {fact["label"]: fact["mean_response_s"] for fact in facts}
        lines.append(
            (label, *(_gain(means[mine], means[other]) for mine in ours for other in theirs))
        )
    return Table(f"Reduction of the mean response{against}", header, tuple(lines))


def _details(facts: list[dict[str, Any]]) -> Table:
    keys = {
        "mean_response_s": "mean",
        "median_s": "median",
        "p95_s": "p95",
        "p99_s": "p99",
        "mean_wait_s": "mean wait",
        "p95_wait_s": "p95 wait",
        "max_wait_s": "max wait",
        "mean_service_s": "mean service",
        "p95_service_s": "p95 service",
    }
    lines = tuple(
        (
            ", ".join(filter(None, (fact["case"], fact["label"]))),
            *(rounded(fact.get(key)) for key in keys),
        )
        for fact in facts
    )
    return Table("Response, waiting and service in s", ("", *keys.values()), lines)


def _panels(scenario: Serve, by_row: Mapping[str, list[dict[str, Any]]]) -> tuple[Bars, ...]:
    """Returns bars per case, a panel for each number of servers (or kind of workload)."""
    panels: dict[str, list[str]] = {}
    for label in by_row:
        head, _, _ = label.rpartition(", ")
        panels.setdefault(head, []).append(label)
    return tuple(
        _bars(head or scenario.title, {label: by_row[label] for label in labels})
        for head, labels in panels.items()
    )


def _bars(title: str, by_row: Mapping[str, list[dict[str, Any]]]) -> Bars:
    means: dict[str, list[float | None]] = {}
    for facts in by_row.values():
        for fact in facts:
            means.setdefault(fact["label"], []).append(fact["mean_response_s"])
    known = [mean for each in means.values() for mean in each if mean is not None]
    return Bars(
        title,
        "mean response (s)",
        tuple(label.rpartition(", ")[2] for label in by_row),
        {label: tuple(values) for label, values in means.items()},
        log_y=bool(known) and max(known) > _LOGARITHMIC * min(known),
    )


def _gain(mine: float | None, other: float | None) -> str | None:
    return None if mine is None or not other else f"{round(100 * (1 - mine / other))} %"
