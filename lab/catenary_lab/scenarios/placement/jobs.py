"""Jobs of scenarios of placement; equal ones are done once (`run_all`)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from catenary_lab.policies import seeded
from catenary_lab.scenarios.cells import percentile
from catenary_lab.scenarios.placement.settings import Case
from catenary_simulator.placement.result import PlacementResult
from catenary_simulator.placement.search import fewest_workers, least_workers
from catenary_simulator.placement.serve import PlacementRun, serve_placement

_ROUNDING = 1e-9

_BY_SESSIONS = {"jsq": "fewest-sessions"}
"""Names of policies that mean another one: engines are balanced by sessions, not by slots."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, small enough to be sent between processes."""

    workers: int
    gpus: int
    attainment: float
    requests: int
    rejected: int
    ttft_late: int
    atgt_late: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    atgt_p50_ms: float | None
    atgt_p99_ms: float | None
    workers_peak: int
    workers_mean: float
    utilisation: float
    preemptions: int
    decision_p50_us: float | None = None
    decision_p99_us: float | None = None


@dataclass(frozen=True, slots=True)
class FewestJob:
    """Looks for the smallest number of workers that reaches an attainment."""

    case: Case
    target: float
    most_workers: int

    def run(self) -> Figures | None:
        """Returns the figures for the least number of workers; None if no number suffices."""
        case = self.case
        workload, kind = case.workload(), case.kind
        may_miss = int((1.0 - self.target) * len(workload) + _ROUNDING)

        def serve(workers: int) -> PlacementResult:
            return serve_placement(run_of(case, workers, may_miss), workload)

        least = least_workers(kind.lines, case.held_to, case.halves[1], case.rate_per_s)
        found = fewest_workers(serve, self.target, least, self.most_workers)
        return None if found is None else figures_of(case, found)


@dataclass(frozen=True, slots=True)
class ServeJob:
    """Serves a workload on a given number of workers."""

    case: Case
    workers: int
    timed: bool = False
    """Whether to time every decision."""

    def run(self) -> Figures:
        run = run_of(self.case, self.workers, None, timed=self.timed)
        return figures_of(self.case, serve_placement(run, self.case.workload()))


def run_of(case: Case, workers: int, may_miss: int | None, *, timed: bool = False) -> PlacementRun:
    """Returns a run of a case on `workers` workers; its policy is new, and has learned."""
    return PlacementRun(
        case.kind,
        workers,
        seeded(_BY_SESSIONS.get(case.policy, case.policy), case.seed),
        case.held_to,
        case.halves[0] if case.policy == "slo" else None,
        case.delays,
        may_miss,
        time.perf_counter_ns if timed else None,
    )


def figures_of(case: Case, result: PlacementResult) -> Figures:
    """Returns the figures of a run."""
    decisions_us = [each / 1000 for each in result.decision_ns]
    return Figures(
        gpus=result.workers * case.worker.gpus,
        decision_p50_us=percentile(decisions_us, 50),
        decision_p99_us=percentile(decisions_us, 99),
        **result.to_json(),
    )
