"""The smallest number of workers that reaches an attainment: Fig. 11 and 12, out of sample."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.placement.jobs import FewestJob, Figures
from catenary_lab.scenarios.placement.schema import Fewest
from catenary_lab.scenarios.placement.schema_parts import PolicySpec
from catenary_lab.scenarios.placement.settings import Row, rows_of
from catenary_lab.scenarios.report import Cell, Findings, Lines, Panel, Table

Found = dict[tuple[str, str, float, int], Figures | None]
"""Figures by engine, policy, rate and seed; None where no number of workers suffices."""


def jobs(scenario: Fewest) -> Iterator[FewestJob]:
    """Yields all searches."""
    for row in rows_of(scenario):
        yield _job(scenario, row)


def report(scenario: Fewest, results: Results) -> Findings:
    """Returns the GPUs per cell, what the first policy saves, plots and facts."""
    rows = rows_of(scenario)
    found: Found = {
        (row.engine, row.policy, row.rate_per_s, row.seed): results[_job(scenario, row)]
        for row in rows
    }
    facts = [_facts(row, found[row.engine, row.policy, row.rate_per_s, row.seed]) for row in rows]
    savings = [
        _saving(scenario, found, engine.label, other.label)
        for engine in scenario.engines
        for other in scenario.policies[1:]
    ]
    tables = [_cells(scenario, found), _summary(scenario, savings)]
    notes = (
        f"Smallest number of workers with {scenario.target:.2%} attainment, tried one after the "
        f"other up to {scenario.most_workers}; {scenario.duration_s:g} s of {scenario.arrivals} "
        f"arrivals into an empty cluster, seeds {', '.join(map(str, scenario.seeds))}. Answers are "
        "predicted from one half of the lengths, requests drawn from the other.",
    )
    return Findings(
        tuple(tables),
        _panels(scenario, found),
        notes,
        {"policies": facts, "savings": savings, "lines": _worker_lines(scenario, found)},
    )


def _job(scenario: Fewest, row: Row) -> FewestJob:
    return FewestJob(row.case, scenario.target, _most_workers(scenario, row.policy))


def _most_workers(scenario: Fewest, label: str) -> int:
    """Returns the number of workers at which the search of a policy gives up."""
    own = next(each.most_workers for each in scenario.policies if each.label == label)
    return min(scenario.most_workers, own or scenario.most_workers)


def _facts(row: Row, figures: Figures | None) -> dict[str, Any]:
    named = {**row.named, "reached": figures is not None}
    if figures is None:
        empty = ("workers", "gpus", "attainment", "ttft_p99_ms", "atgt_p99_ms")
        return {**named, **dict.fromkeys(empty)}
    return {**named, **asdict(figures)}


def _saving(scenario: Fewest, found: Found, engine: str, other: str) -> dict[str, Any]:
    """Compares the first policy with another, cell by cell."""
    mine = scenario.policies[0].label
    ratios: list[float] = []
    ours = theirs = more = reached = missed = 0
    for rate in scenario.rates_per_s:
        for seed in scenario.seeds:
            own, rival = found[engine, mine, rate, seed], found[engine, other, rate, seed]
            if rival is None:
                continue
            reached += 1
            if own is None:
                missed += 1
                continue
            ratios.append(own.gpus / rival.gpus)
            ours, theirs = ours + own.gpus, theirs + rival.gpus
            more += own.gpus > rival.gpus
    return {
        "engine": engine,
        "policy": mine,
        "beside": other,
        "cells": len(scenario.rates_per_s) * len(scenario.seeds),
        "cells_reached_by_other": reached,
        "cells_not_reached": missed,
        "cells_with_more_gpus": more,
        "gpus": ours,
        "gpus_of_other": theirs,
        "fewer_in_total": 1 - ours / theirs if theirs else None,
        "fewer_on_average": 1 - statistics.fmean(ratios) if ratios else None,
        "least": 1 - max(ratios) if ratios else None,
        "most": 1 - min(ratios) if ratios else None,
    }


def _worker_lines(scenario: Fewest, found: Found) -> list[dict[str, Any]]:
    """Fits eq. 7, N_w = k5 r_a + c5, to every policy's workers by least squares."""
    lines = []
    for engine in scenario.engines:
        for policy in scenario.policies:
            points = [
                (rate, figures.workers)
                for rate in scenario.rates_per_s
                for seed in scenario.seeds
                if (figures := found[engine.label, policy.label, rate, seed]) is not None
            ]
            if len({rate for rate, _ in points}) < 2:
                continue
            slope, base = statistics.linear_regression(*zip(*points, strict=True))
            lines.append({"engine": engine.label, "policy": policy.label, "k5": slope, "c5": base})
    return lines


def _cells(scenario: Fewest, found: Found) -> Table:
    header = ("engine", "req/s", *(each.label for each in scenario.policies))
    rows: list[tuple[Cell, ...]] = []
    for engine in scenario.engines:
        for rate in scenario.rates_per_s:
            cells = [
                " / ".join(
                    _gpus(scenario, policy, found[engine.label, policy.label, rate, seed])
                    for seed in scenario.seeds
                )
                for policy in scenario.policies
            ]
            rows.append((engine.label, f"{rate:g}", *cells))
            known = scenario.expected.get(f"{engine.label} {rate:g}")
            if known is None and engine is scenario.engines[0]:
                known = scenario.expected.get(f"{rate:g}")
            if known:
                rows.append(("- reference", "", *(_text(known.get(key)) for key in header[2:])))
    seeds = " / ".join(map(str, scenario.seeds))
    return Table(f"GPUs for {scenario.target:.0%} attainment, seeds {seeds}", header, tuple(rows))


def _summary(scenario: Fewest, savings: list[dict[str, Any]]) -> Table:
    mine = scenario.policies[0].label
    header = (
        f"{mine} beside",
        "engine",
        "fewer GPUs in total",
        "on average of cells",
        "worst cell",
        "best cell",
        "cells with more",
        "cells only the other reached",
    )
    rows: list[tuple[Cell, ...]] = [
        (
            each["beside"],
            each["engine"],
            _percent(each["fewer_in_total"]),
            _percent(each["fewer_on_average"]),
            _percent(each["least"]),
            _percent(each["most"]),
            f"{each['cells_with_more_gpus']} of {each['cells']}",
            f"{each['cells_not_reached']}",
        )
        for each in savings
    ]
    return Table(f"What {mine} saves", header, tuple(rows))


def _panels(scenario: Fewest, found: Found) -> tuple[Panel, ...]:
    panels = []
    for engine in scenario.engines:
        series: dict[str, tuple[tuple[float, float], ...]] = {}
        for policy in scenario.policies:
            points = []
            for rate in scenario.rates_per_s:
                values = [
                    figures.gpus
                    for seed in scenario.seeds
                    if (figures := found[engine.label, policy.label, rate, seed]) is not None
                ]
                if len(values) == len(scenario.seeds):
                    points.append((rate, statistics.fmean(values)))
            series[policy.label] = tuple(points)
        title = f"{engine.label}: GPUs for {scenario.target:.0%}, mean of seeds"
        panels.append(Lines(title, "requests per second", "GPUs", series))
    return tuple(panels)


def _gpus(scenario: Fewest, policy: PolicySpec, figures: Figures | None) -> str:
    if figures is not None:
        return str(figures.gpus)
    gpus = scenario.workers[policy.workers].gpus
    return f"> {gpus * _most_workers(scenario, policy.label)}"


def _text(value: float | str | None) -> str | None:
    return value if isinstance(value, str) or value is None else f"{value:g}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.0f} %"
