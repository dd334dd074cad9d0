"""Service in simulation, compared with the limits: load factors, decisions, speed.

Load factor 1 is each model's rate in the reference's plan, for every planner and policy. A figure
is the mean over models, instances and seeds of the largest factor with 99 % in time. Arrivals are
Poisson unless said otherwise. The full form takes the better part of an hour on two cores; the
short one has one instance per cluster, one seed and 5 s.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import Figure, at_least, at_most, table
from catenary_lab.pools.compared import Planner
from catenary_lab.scenarios.data import data_folder
from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.pools.jobs import (
    Dispatch,
    Load,
    LoadFactorJob,
    OfInstance,
    Plan,
)
from catenary_lab.scenarios.runner import run_all
from catenary_scheduler.planning.pooled import plan_pools
from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_simulator import SimulationOptions, SimulationResult, simulate
from catenary_simulator.load_factor import Search

LIMIT_EVENTS_PER_SECOND = 100_000.0
LIMIT_P50_US, LIMIT_P99_US = 10.0, 40.0
LIMIT_GROWTH = 2.0
LIMIT_REFERENCE_PLANS, LIMIT_OWN_PLANS = 0.97, 0.99
LIMIT_OVER_REACTIVE = 1.25
LIMIT_OVER_NP, LIMIT_OVER_DART_R = 1.3, 1.15
TIMED = "maf19/0.3-0.33-0.37/G1/HC2-L"
TIMED_LOAD = 0.9


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs over which a figure is the mean."""

    instances: tuple[str, ...]
    seeds: tuple[int, ...]
    duration_s: float

    def of(
        self, planner: Planner, dispatch: Dispatch = "reservation", arrivals: str = "poisson"
    ) -> list[LoadFactorJob]:
        """Returns a search for every instance and seed."""
        return [
            LoadFactorJob(
                Plan(ppipe(), OfInstance(instance), planner),
                Load(arrivals, "reference", self.duration_s, seed),
                dispatch,
                Search(),
            )
            for instance in self.instances
            for seed in self.seeds
        ]


def ppipe() -> Path:
    """Returns the folder of the PPipe reference data."""
    return data_folder("ppipe", "dataset")


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    data = load_dataset(ppipe())
    groups = [name for name in data.instances if name.startswith("maf19")]
    alone = [name for name in data.instances if name.startswith("ablation")]
    if quick:
        main = Runs(tuple(groups[::5]), (1,), 5.0)
        bursty, ablation = main, Runs(tuple(alone[::4]), (1,), 2.0)
    else:
        main = Runs(tuple(groups), (1, 2, 3, 4, 5), 30.0)
        bursty = Runs(tuple(groups), (1,), 30.0)
        ablation = Runs(tuple(alone), (1,), 10.0)
    return [*_timed(data, 2.0 if quick else 10.0), *_serving(main, bursty, ablation)]


def _timed(data: PlanningDataset, duration_s: float) -> list[Figure]:
    """Returns the speed of the simulation and of decisions, with a plan of one instance."""
    problem = data.problem(TIMED)
    plan = plan_pools(problem)
    small = _served(problem, plan, duration_s)
    large = _served(*larger(problem, plan, 10), duration_s / 10)
    assert small.dispatch_us is not None
    assert large.dispatch_us is not None
    p50, p99 = small.dispatch_us
    growth = large.dispatch_us[0] / p50
    return [
        at_least("events, 100 GPUs", small.events_per_second, "1/s", LIMIT_EVENTS_PER_SECOND),
        at_least("events, 1,000 GPUs", large.events_per_second, "1/s", LIMIT_EVENTS_PER_SECOND),
        at_most("decision p50, 100 GPUs, 90 % load", p50, "us", LIMIT_P50_US),
        at_most("decision p99, 100 GPUs, 90 % load", p99, "us", LIMIT_P99_US),
        at_most("decision p50, 1,000 GPUs, 90 % load", large.dispatch_us[0], "us"),
        at_most("decision p99, 1,000 GPUs, 90 % load", large.dispatch_us[1], "us"),
        at_most("growth of the p50 from 100 to 1,000 GPUs", growth, "times", LIMIT_GROWTH),
    ]


def _served(problem: PoolingProblem, plan: PooledPlan, duration_s: float) -> SimulationResult:
    base = {model.name: model.weight * plan.objective for model in problem.models}
    return simulate(problem, plan, SimulationOptions(base, TIMED_LOAD, duration_s))


def larger(
    problem: PoolingProblem, plan: PooledPlan, times: int
) -> tuple[PoolingProblem, PooledPlan]:
    """Returns a cluster and a plan `times` times as large."""
    classes = tuple(replace(each, count=each.count * times) for each in problem.classes)
    models = tuple(
        replace(
            model,
            throughput_rps=model.throughput_rps * times,
            pipelines=tuple(
                replace(
                    pipeline,
                    throughput_rps=pipeline.throughput_rps * times,
                    partitions=tuple(
                        replace(part, vgpus=part.vgpus * times, gpus=part.gpus * times)
                        for part in pipeline.partitions
                    ),
                )
                for pipeline in model.pipelines
            ),
        )
        for model in plan.models
    )
    grown = replace(plan, objective=plan.objective * times, models=models)
    return replace(problem, classes=classes), grown


def _serving(main: Runs, bursty: Runs, ablation: Runs) -> list[Figure]:
    compared: tuple[Planner, ...] = ("catenary", "np", "dart-r")
    bursts = {
        (planner, cv): bursty.of(planner, arrivals=f"gamma:{cv}")
        for planner in compared
        for cv in (2, 4)
    }
    theirs, ours = main.of("reference"), main.of("catenary")
    reserved, reactive = ablation.of("reference"), ablation.of("reference", "reactive")
    everything: list[LoadFactorJob] = [*theirs, *ours, *reserved, *reactive]
    everything += [job for jobs in bursts.values() for job in jobs]
    results = run_all(everything)
    factor = _mean(results, theirs)
    figures = [
        at_least("load factor, reference's plans", factor, "", LIMIT_REFERENCE_PLANS),
        at_least("load factor, our plans", _mean(results, ours), "", LIMIT_OWN_PLANS),
        at_most("load factor, 10 % margin, reservation", _mean(results, reserved), ""),
        at_most("load factor, 10 % margin, reactive", _mean(results, reactive), ""),
        at_least(
            "reservation over reactive, 10 % margin",
            _mean(results, reserved) / _mean(results, reactive),
            "times",
            LIMIT_OVER_REACTIVE,
        ),
    ]
    for cv in (2, 4):
        means = {planner: _mean(results, bursts[planner, cv]) for planner in compared}
        label = f"bursty (cv {cv})"
        over_np, over_dart = (means["catenary"] / means[other] for other in ("np", "dart-r"))
        figures += [
            at_most(f"load factor, {label}, our plans", means["catenary"], ""),
            at_least(f"{label}: over NP", over_np, "times", LIMIT_OVER_NP),
            at_least(f"{label}: over DART-r", over_dart, "times", LIMIT_OVER_DART_R),
        ]
    return figures


def _mean(results: Results, jobs: Iterable[LoadFactorJob]) -> float:
    return statistics.mean(model.load_factor for job in jobs for model in results[job].models)


def main() -> None:
    """Prints the figures as a table."""
    print(table(run(quick=False)))


if __name__ == "__main__":
    main()
