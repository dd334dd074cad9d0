"""Clusters that scale under a rate that changes, beside one of fixed size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.placement.jobs import Figures, figures_of, run_of
from catenary_lab.scenarios.placement.schema import Scaling
from catenary_lab.scenarios.placement.schema_parts import ClusterSpec
from catenary_lab.scenarios.placement.settings import Case, Row, rows_of
from catenary_lab.scenarios.report import Bars, Cell, Findings, Table
from catenary_scheduler.scaling.workers.workers_line import SessionLengths as MeanLengths
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.placement.scaled import ScaledRun, serve_scaled
from catenary_simulator.placement.serve import serve_placement
from catenary_simulator.placement.workload import RequestWorkload, stepped_workload


@dataclass(frozen=True, slots=True)
class Scaled:
    """The cost of a run in worker-seconds, and the attainment of its requests."""

    figures: Figures
    worker_s: float
    peak: int
    orders: int


@dataclass(frozen=True, slots=True)
class ScalingJob:
    """One cluster under one changing rate."""

    case: Case
    cluster: ClusterSpec
    steps: tuple[float, ...]
    workers_per_rps: float
    workers_base: float
    most_workers: int

    def run(self) -> Scaled:
        case, workload = self.case, self.workload()
        if self.cluster.scaling == "fixed":
            workers = self._workers(max(self.steps))
            served = serve_placement(run_of(case, workers, None), workload)
            span_s = workload.arrived_ns[-1] / NANOSECONDS_PER_SECOND
            return Scaled(figures_of(case, served), workers * span_s, workers, 0)
        learned = case.halves[0]
        mean = MeanLengths(float(np.mean(learned.prompts)), float(np.mean(learned.answers)))
        run = run_of(case, self._workers(self.steps[0]), None)
        cold_start_ns = round(self.cluster.cold_start_s * NANOSECONDS_PER_SECOND)
        found = serve_scaled(ScaledRun(run, cold_start_ns, self.most_workers, mean), workload)
        return Scaled(figures_of(case, found.served), found.worker_s, found.peak, found.orders)

    def workload(self) -> RequestWorkload:
        """Returns the requests."""
        case = self.case
        return stepped_workload(
            case.halves[1],
            parse_arrivals(case.arrivals),
            [case.rate_per_s * step for step in self.steps],
            case.duration_s,
            case.seed,
        )

    def _workers(self, step: float) -> int:
        """Returns the number of workers at a rate by eq. 7."""
        needed = self.workers_per_rps * step * self.case.rate_per_s + self.workers_base
        return max(1, min(self.most_workers, math.ceil(needed)))


def jobs(scenario: Scaling) -> Iterator[ScalingJob]:
    """Yields all runs."""
    for row in rows_of(scenario):
        for cluster in scenario.clusters:
            yield _job(scenario, row, cluster)


def report(scenario: Scaling, results: Results) -> Findings:
    """Returns worker-seconds and attainment of every cluster, a plot and facts."""
    facts = [
        _facts(row, cluster, results[_job(scenario, row, cluster)])
        for row in rows_of(scenario)
        for cluster in scenario.clusters
    ]
    header = (
        "cluster",
        "policy",
        "req/s",
        "seed",
        "attainment",
        "worker-seconds",
        "workers, peak",
        "orders",
    )
    rows: list[tuple[Cell, ...]] = [
        (
            fact["cluster"],
            fact["policy"],
            f"{fact['rate_per_s']:g}",
            str(fact["seed"]),
            f"{100 * fact['attainment']:.1f} %",
            f"{fact['worker_s']:.0f}",
            str(fact["peak"]),
            str(fact["orders"]),
        )
        for fact in facts
    ]
    steps = ", ".join(f"{step:g}" for step in scenario.steps)
    caption = f"Rates of {steps} times the one named, {scenario.duration_s:g} s in all"
    groups = tuple(dict.fromkeys(f"{fact['policy']}, seed {fact['seed']}" for fact in facts))
    series = {
        cluster.label: tuple(
            fact["worker_s"] for fact in facts if fact["cluster"] == cluster.label
        )[: len(groups)]
        for cluster in scenario.clusters
    }
    panel = Bars("worker-seconds while requests arrive", "worker-seconds", groups, series)
    return Findings(
        (Table(caption, header, tuple(rows)),),
        (panel,),
        facts={"policies": facts},
    )


def _job(scenario: Scaling, row: Row, cluster: ClusterSpec) -> ScalingJob:
    return ScalingJob(
        row.case,
        cluster,
        tuple(scenario.steps),
        scenario.workers_per_rps,
        scenario.workers_base,
        scenario.most_workers,
    )


def _facts(row: Row, cluster: ClusterSpec, found: Scaled) -> dict[str, Any]:
    return {
        **row.named,
        "case": f"{cluster.label}, {row.named['case']}",
        "cluster": cluster.label,
        **asdict(found.figures),
        "worker_s": found.worker_s,
        "peak": found.peak,
        "orders": found.orders,
    }
