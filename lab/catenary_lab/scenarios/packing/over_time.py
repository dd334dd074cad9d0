"""Active GPUs epoch by epoch: Fig. 15."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.packing.facts import facts_of, seeds_note, table
from catenary_lab.scenarios.packing.schema import OverTime
from catenary_lab.scenarios.packing.settings import case_of, rows_of
from catenary_lab.scenarios.report import Findings, Lines, Table

_POINTS = 200
"""Largest number of points of a curve; each is the mean of its stretch."""


def report(scenario: OverTime, results: Results) -> Findings:
    """Returns curves of active GPUs, how often the first policy has the fewest, and facts."""
    rows = rows_of(scenario)
    facts = facts_of(rows, results)
    series = {
        (row.gpu, row.workload, row.policy): results[row.job].gpus
        for row in rows
        if row.seed == scenario.seeds[0]
    }
    panels = tuple(
        Lines(
            case_of(gpu, workload.label),
            "seconds",
            "active GPUs",
            {
                policy.label: _curve(series[gpu, workload.label, policy.label], scenario.epoch_s)
                for policy in scenario.policies
            },
        )
        for gpu in scenario.gpus
        for workload in scenario.workloads
    )
    over_time = [
        {"gpu": gpu, "workload": workload, "policy": policy, "gpus": list(found)}
        for (gpu, workload, policy), found in series.items()
    ]
    notes = (seeds_note(scenario), f"Drawn: seed {scenario.seeds[0]}.")
    return Findings(
        (table(scenario, facts, "gpus_mean"), _fewest(scenario, series)),
        panels,
        notes,
        {"policies": facts, "over_time": over_time},
    )


def _curve(gpus: tuple[int, ...], epoch_s: float) -> tuple[tuple[float, float], ...]:
    stretch = max(1, -(-len(gpus) // _POINTS))
    return tuple(
        (begin * epoch_s, sum(gpus[begin : begin + stretch]) / len(gpus[begin : begin + stretch]))
        for begin in range(0, len(gpus), stretch)
    )


def _fewest(scenario: OverTime, series: Mapping[tuple[str, str, str], tuple[int, ...]]) -> Table:
    """Returns the share of the epochs after the warm-up in which a policy has the fewest GPUs."""
    begin = round(scenario.warm_up_s / scenario.epoch_s)
    labels = [each.label for each in scenario.policies]
    rows = []
    for gpu in scenario.gpus:
        for workload in scenario.workloads:
            each = [series[gpu, workload.label, label][begin:] for label in labels]
            least = [min(at) for at in zip(*each, strict=True)]
            shares = [
                sum(own == best for own, best in zip(found, least, strict=True)) / len(least)
                for found in each
            ]
            cells = (f"{100 * share:.0f} %" for share in shares)
            rows.append((case_of(gpu, workload.label), *cells))
    return Table("Epochs in which no other takes fewer GPUs", ("", *labels), tuple(rows))
