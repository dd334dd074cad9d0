"""GBP-CR beside random placements: Fig. 3."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from catenary_lab.scenarios.cells import known_mean, rounded
from catenary_lab.scenarios.chains.jobs import Setting
from catenary_lab.scenarios.chains.schema import Placement
from catenary_lab.scenarios.chains.settings import cases_of
from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.report import Cell, Findings, Lines, Table
from catenary_scheduler.planning.chains import ChainTask, gbp_cr

_QUANTILES = (0, 25, 50, 75, 100)
_SERIES = {"GBP-CR": None, "random: least": 0, "random: median": 2, "random: most": 4}


@dataclass(frozen=True, slots=True)
class Compared:
    """The numbers c K(c) of one topology."""

    greedy: int | None
    """The number of GBP-CR; None if all servers together do not reach the rate."""
    random: tuple[int, ...]
    """Numbers of the random placements that reach the rate."""


@dataclass(frozen=True, slots=True)
class PlacementJob:
    """One topology under one load."""

    setting: Setting
    c: int
    rate_per_s: float
    target_load: float
    placements: int
    seed: int

    def run(self) -> Compared:
        task = self.setting.cluster().task(self.rate_per_s, self.target_load, "rate")
        placed = gbp_cr(task, self.c)
        blocks = np.array(placed.max_blocks)
        random = np.random.default_rng((self.seed, 4))
        found = [
            groups_in_order(task, self.c, blocks, random.permutation(len(blocks)))
            for _ in range(self.placements)
        ]
        greedy = placed.groups_needed
        return Compared(
            None if greedy is None else self.c * greedy,
            tuple(self.c * each for each in found if each is not None),
        )


def groups_in_order(
    task: ChainTask, c: int, blocks: np.ndarray[Any, Any], order: np.ndarray[Any, Any]
) -> int | None:
    """Returns K(c) of disjoint chains strung of the servers in this order; None: rate not reached.

    Args:
        task: Times and the rate needed.
        c: Number of simultaneous sessions.
        blocks: Number of blocks of every server, m_j(c).
        order: Order of the servers.
    """
    needed = float(task.rate_per_s) / (float(task.load) * c)
    groups, hosted, service_s, rate = 0, 0, 0.0, 0.0
    for number in order.tolist():
        if blocks[number] == 0:
            continue
        server = task.servers[number]
        hosted += int(blocks[number])
        service_s += float(server.communication_s) + float(server.block_s) * int(blocks[number])
        if hosted >= task.blocks:
            groups, rate = groups + 1, rate + 1 / service_s
            hosted, service_s = 0, 0.0
            if rate >= needed:
                return groups
    return None


def jobs(scenario: Placement) -> Iterator[PlacementJob]:
    """Yields all runs."""
    for rate in scenario.rates_per_s:
        for case in cases_of(scenario, [1]):
            yield from _jobs(scenario, rate, case.label)


def report(scenario: Placement, results: Results) -> Findings:
    """Returns quantiles of random placements beside GBP-CR."""
    facts = [
        _facts(
            rate,
            case.label,
            scenario.placements,
            [results[job] for job in _jobs(scenario, rate, case.label)],
        )
        for case in cases_of(scenario, [1])
        for rate in scenario.rates_per_s
    ]
    rows: list[tuple[Cell, ...]] = [
        (
            f"{fact['case']}, {fact['rate_per_s']:g}/s",
            rounded(fact["c_k"], 1),
            *(rounded(each, 1) for each in fact["random"] or (None,) * len(_QUANTILES)),
            f"{fact['random_feasible']:.0%}",
            f"{fact['never_beaten']} of {fact['runs']}",
        )
        for fact in facts
    ]
    header = (
        "",
        "GBP-CR",
        "least",
        "25 %",
        "median",
        "75 %",
        "most",
        "feasible",
        "GBP-CR not beaten",
    )
    caption = f"c K(c) for c={scenario.c}: GBP-CR and {scenario.placements} random placements"
    panels = tuple(
        Lines(
            case.label,
            "arrivals per second",
            "c K(c)",
            {
                label: tuple(
                    (fact["rate_per_s"], value)
                    for fact in facts
                    if fact["case"] == case.label and (value := _value(fact, quantile)) is not None
                )
                for label, quantile in _SERIES.items()
            },
        )
        for case in cases_of(scenario, [1])
    )
    note = f"Means over {facts[0]['runs']} topologies; feasible: random placements with the rate."
    return Findings(
        (Table(caption, header, tuple(rows)),),
        panels,
        (note,),
        {"policies": facts},
    )


def _value(fact: Mapping[str, Any], quantile: int | None) -> float | None:
    """Returns c K(c) of GBP-CR, or a quantile of the random placements'."""
    found: float | None = None
    if quantile is None:
        found = fact["c_k"]
    elif fact["random"]:
        found = fact["random"][quantile]
    return found


def _jobs(scenario: Placement, rate: float, label: str) -> list[PlacementJob]:
    return [
        PlacementJob(setting, scenario.c, rate, scenario.target_load, scenario.placements, seed)
        for case in cases_of(scenario, [1])
        if case.label == label
        for setting, seed in zip(case.settings, case.seeds, strict=True)
    ]


def _facts(rate: float, label: str, placements: int, found: list[Compared]) -> dict[str, Any]:
    reached = [each for each in found if each.greedy is not None]
    both = [each for each in reached if each.random]
    quantiles = [np.percentile(each.random, _QUANTILES) for each in both]
    tried = sum(len(each.random) for each in found)
    return {
        "policy": "gbp-cr",
        "case": label,
        "rate_per_s": rate,
        "runs": len(found),
        "c_k": known_mean(each.greedy for each in found),
        "random": [float(each) for each in np.mean(quantiles, axis=0)] if quantiles else None,
        "random_feasible": tried / (len(found) * placements),
        "never_beaten": sum(
            (each.greedy or math.inf) <= min(each.random, default=math.inf) for each in found
        ),
    }
