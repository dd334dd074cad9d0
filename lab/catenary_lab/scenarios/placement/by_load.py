"""Figures over a range of loads, on clusters of a given size: Fig. 9, 10 and 13, and demand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.placement.jobs import ServeJob
from catenary_lab.scenarios.placement.schema import Attainment, Demand, Overhead
from catenary_lab.scenarios.placement.settings import Row, rows_of
from catenary_lab.scenarios.report import Cell, Findings, Lines, Measure, Table

ByLoad = Attainment | Demand | Overhead
Facts = dict[str, Any]


_ATTAINED = Measure("attainment", "SLO attainment (%)", 100.0)
MEASURES: Mapping[str, tuple[Measure, ...]] = {
    "attainment": (
        _ATTAINED,
        Measure("atgt_p99_ms", "P99 ATGT (ms)"),
        Measure("ttft_p99_ms", "P99 TTFT (ms)", drawn=False),
    ),
    "demand": (
        Measure("workers_peak", "workers, most at a time", digits=0),
        Measure("workers_mean", "workers, mean over time"),
        Measure("attainment", "SLO attainment (%)", 100.0, drawn=False),
    ),
    "overhead": (
        Measure("decision_p50_us", "decision, median (us)"),
        Measure("decision_p99_us", "decision, 99th percentile (us)"),
        Measure("workers", "workers", digits=0, drawn=False),
        Measure("attainment", "SLO attainment (%)", 100.0, drawn=False),
    ),
}


def jobs(scenario: ByLoad) -> Iterator[ServeJob]:
    """Yields all runs."""
    for row in rows_of(scenario):
        yield _job(scenario, row)


def report(scenario: ByLoad, results: Results) -> Findings:
    """Returns a table per measure, plots and facts."""
    facts = [{**row.named, **asdict(results[_job(scenario, row)])} for row in rows_of(scenario)]
    seeds = len(scenario.seeds)
    notes = (
        f"{scenario.duration_s:g} s of {scenario.arrivals} arrivals into an empty cluster; "
        + ("one seed." if seeds == 1 else f"means of {seeds} seeds."),
    )
    measures = MEASURES[scenario.kind]
    tables = tuple(_table(scenario, facts, measure) for measure in measures)
    panels = tuple(
        _panel(scenario, facts, measure, engine.label)
        for engine in scenario.engines
        for measure in measures
        if measure.drawn
    )
    return Findings(tables, panels, notes, {"policies": facts})


def mean_of(facts: list[Facts], key: str, **named: Any) -> float | None:
    """Returns the mean of a figure over the facts of these names; None if one lacks it."""
    values = [
        fact[key] for fact in facts if all(fact[name] == value for name, value in named.items())
    ]
    return None if not values or None in values else statistics.fmean(values)


def _job(scenario: ByLoad, row: Row) -> ServeJob:
    match scenario:
        case Attainment():
            return ServeJob(row.case, max(1, scenario.gpus // row.case.worker.gpus))
        case Demand():
            return ServeJob(row.case, scenario.most_workers)
        case Overhead():
            workers = math.ceil(scenario.workers_per_rps * row.rate_per_s)
            return ServeJob(row.case, workers, timed=True)


def _table(scenario: ByLoad, facts: list[Facts], measure: Measure) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for engine in scenario.engines:
        for rate in scenario.rates_per_s:
            values = [
                mean_of(
                    facts, measure.key, engine=engine.label, rate_per_s=rate, policy=policy.label
                )
                for policy in scenario.policies
            ]
            rows.append((engine.label, f"{rate:g}", *map(measure.text, values)))
    header = ("engine", "req/s", *(policy.label for policy in scenario.policies))
    return Table(measure.caption, header, tuple(rows))


def _panel(scenario: ByLoad, facts: list[Facts], measure: Measure, engine: str) -> Lines:
    series: dict[str, tuple[tuple[float, float], ...]] = {}
    for policy in scenario.policies:
        points = []
        for rate in scenario.rates_per_s:
            value = mean_of(facts, measure.key, engine=engine, rate_per_s=rate, policy=policy.label)
            if value is not None:
                points.append((rate, measure.scale * value))
        series[policy.label] = tuple(points)
    return Lines(engine, "requests per second", measure.caption, series)
