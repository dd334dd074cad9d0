"""Job servers that GCA needs for a rate, beside bounds and an integer program: Fig. 4."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from catenary_lab.scenarios.cells import known_mean
from catenary_lab.scenarios.chains.jobs import Setting
from catenary_lab.scenarios.chains.schema import Allocation
from catenary_lab.scenarios.chains.settings import runs_of
from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.report import Cell, Findings, Lines, Table
from catenary_scheduler.planning.chains import Composition, compose, gbp_cr
from catenary_services.errors import InternalError

LABELS = {
    "reserved": "c K(c)",
    "gca": "GCA",
    "optimal": "optimal ILP",
    "lower": "lower bound",
}
_NEAR = 1e-9
_ILP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Needed:
    """Numbers of job servers for one rate; None: the rate is not reached."""

    reserved: int | None
    """Number with the disjoint chains of GBP-CR alone, c K(c)."""
    gca: int | None
    optimal: int | None
    """Least number with the chains of GCA, whose capacities are free."""
    lower: int
    """Lower bound: the number if all were as fast as the fastest chain."""


@dataclass(frozen=True, slots=True)
class AllocationJob:
    """One topology under one load."""

    setting: Setting
    c: int
    load: float
    target_load: float

    def run(self) -> Needed:
        cluster = self.setting.cluster()
        composition = compose(cluster.task(1.0, self.target_load, "all"), self.c)
        rate = self.load * composition.total_rate_per_s
        needed = rate / self.target_load
        reserved = gbp_cr(cluster.task(rate, self.target_load, "all"), self.c).groups_needed
        fastest = max(chain.rate_per_s for chain in composition.chains)
        return Needed(
            None if reserved is None else self.c * reserved,
            fewest_in_order(composition, needed),
            fewest_by_program(composition, needed),
            math.ceil(needed / fastest - _NEAR),
        )


def fewest_in_order(composition: Composition, needed_per_s: float) -> int | None:
    """Returns how many job servers, the fastest first, reach a rate; None if all do not."""
    rate, count = 0.0, 0
    for chain in sorted(composition.chains, key=lambda each: each.service_s):
        take = math.ceil((needed_per_s - rate) / chain.rate_per_s - _NEAR)
        if take <= chain.capacity:
            return count + max(0, take)
        rate += chain.capacity * chain.rate_per_s
        count += chain.capacity
    return None


def fewest_by_program(composition: Composition, needed_per_s: float) -> int | None:
    """Returns the least sum of capacities with a rate that the caches have room for (eq. 7).

    Chains are those of the composition. None if there is no solution.
    """
    chains, hosts = composition.chains, composition.hosted
    rows = [
        [sum(hop.blocks for hop in chain.hops if hop.server == host.server) for chain in chains]
        for host in hosts
    ]
    rows.append([chain.rate_per_s for chain in chains])  # type: ignore[misc]
    matrix = np.array(rows, dtype=np.float64)
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", _ILP_SECONDS)
    infinite = highspy.kHighsInf
    for number in range(len(chains)):
        solver.addCol(1.0, 0.0, infinite, 0, np.array([], np.int32), np.array([]))
        solver.changeColIntegrality(number, highspy.HighsVarType.kInteger)
    columns = np.arange(len(chains), dtype=np.int32)
    for host, row in zip(hosts, matrix, strict=False):
        solver.addRow(-infinite, float(host.slots), len(chains), columns, row)
    solver.addRow(needed_per_s * (1 - _NEAR), infinite, len(chains), columns, matrix[-1])
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    if status != highspy.HighsModelStatus.kOptimal:
        raise InternalError(f"the integer program ended as {status}")
    return round(solver.getInfo().objective_function_value)


def jobs(scenario: Allocation) -> Iterator[AllocationJob]:
    """Yields all runs."""
    for load in scenario.loads:
        yield from _jobs(scenario, load)


def report(scenario: Allocation, results: Results) -> Findings:
    """Returns means over topologies, a plot and facts."""
    facts = [
        _facts(load, [results[job] for job in _jobs(scenario, load)]) for load in scenario.loads
    ]
    rows: list[tuple[Cell, ...]] = [
        (f"{fact['load']:g}", *(_cell(fact, key) for key in LABELS), fact["gca_optimal"])
        for fact in facts
    ]
    header = ("lambda / nu", *LABELS.values(), "GCA is optimal")
    caption = f"Job servers for the rate lambda / {scenario.target_load:g} (c={scenario.c})"
    series = {
        label: tuple(
            (fact["load"], fact["job_servers"][key])
            for fact in facts
            if fact["job_servers"][key] is not None
        )
        for key, label in LABELS.items()
    }
    panel = Lines(scenario.title, "lambda / nu", "job servers", series)
    notes = (f"Means over {facts[0]['runs']} topologies.",)
    return Findings(
        (Table(caption, header, tuple(rows)),),
        (panel,),
        notes,
        {"policies": facts},
    )


def _jobs(scenario: Allocation, load: float) -> list[AllocationJob]:
    return [
        AllocationJob(setting, scenario.c, load, scenario.target_load)
        for setting, _ in runs_of(scenario)
    ]


def _facts(load: float, found: list[Needed]) -> dict[str, Any]:
    return {
        "policy": "gca",
        "case": f"load {load:g}",
        "load": load,
        "runs": len(found),
        "job_servers": {key: known_mean(getattr(each, key) for each in found) for key in LABELS},
        "reached": {key: sum(getattr(each, key) is not None for each in found) for key in LABELS},
        "gca_optimal": f"{sum(each.gca == each.optimal for each in found)} of {len(found)}",
    }


def _cell(fact: Mapping[str, Any], key: str) -> str:
    value, reached = fact["job_servers"][key], fact["reached"][key]
    if value is None:
        return "not reached"
    return f"{value:.1f}" + ("" if reached == fact["runs"] else f" (in {reached})")
