"""Speed of the simulators and of the decisions in them: pools, chains, placement.

What the simulations find is in the scenarios, which say what they expect of it (`expect`). Chains
and placement are timed in CPU time, so that their speed does not depend on the load of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from catenary_lab.limits import Figure, at_least, at_most
from catenary_lab.scenarios.data import data_folder
from catenary_lab.scenarios.placement.jobs import run_of
from catenary_lab.scenarios.placement.schema import FILES, Fewest
from catenary_lab.scenarios.placement.settings import rows_of
from catenary_scheduler.planning.chains import best_composition
from catenary_scheduler.planning.pooled import plan_pools
from catenary_scheduler.planning.pooled.dataset import load_dataset
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_simulator import SimulationOptions, SimulationResult, simulate
from catenary_simulator.arrivals import PoissonArrivals
from catenary_simulator.chains.cluster import (
    ChainsCluster,
    CommunicationCost,
    DecoderModel,
    GpuSlice,
    ServerSite,
    cluster_of,
)
from catenary_simulator.chains.serve import serve_chains
from catenary_simulator.chains.workload import exponential
from catenary_simulator.placement.serve import serve_placement

POOLS_INSTANCE = "maf19/0.3-0.33-0.37/G1/HC2-L"
POOLS_LOAD = 0.9
LIMIT_EVENTS_PER_SECOND = 100_000.0
LIMIT_P50_US, LIMIT_P99_US = 10.0, 40.0
LIMIT_GROWTH = 2.0

CHAINS_LOAD = 0.8
CHAINS_SESSIONS = 20_000
LIMIT_SESSIONS_PER_SECOND = 5_000.0
LIMIT_CHAINS_US = 5.0

PLACEMENT = Path(__file__).parents[1] / "scenarios/placement/out-of-sample-13b.yaml"
PLACEMENT_WORKERS = 25
PLACEMENT_RATE = 25.0
LIMIT_TIMES_REAL_TIME = 50.0
LIMIT_PLACEMENT_US = 100.0


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return [*_pools(2.0 if quick else 10.0), *_chains(20), *_chains(1_000), *_placement()]


def _pools(duration_s: float) -> list[Figure]:
    """Returns the speed of the simulation and of decisions, with a plan of one instance."""
    problem = load_dataset(data_folder("ppipe", "dataset")).problem(POOLS_INSTANCE)
    plan = plan_pools(problem)
    small = _served(problem, plan, duration_s)
    large = _served(*larger_pools(problem, plan, 10), duration_s / 10)
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
    return simulate(problem, plan, SimulationOptions(base, POOLS_LOAD, duration_s))


def larger_pools(
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


def _chains(servers: int) -> list[Figure]:
    """Returns the sessions served per CPU second, and the time of the choices of a chain."""
    cluster = chains_of(servers)
    composition = best_composition(cluster.task(0.01 * servers))
    rate = CHAINS_LOAD * composition.total_rate_per_s
    workload = exponential(PoissonArrivals(), rate, (2000, 20), CHAINS_SESSIONS, 1)
    began = time.process_time()
    serve_chains(cluster, composition, "jffc", workload)
    speed = CHAINS_SESSIONS / (time.process_time() - began)
    timed = serve_chains(cluster, composition, "jffc", workload, time.perf_counter_ns)
    name = f"{len(composition.chains)} chains, {servers:,} servers"
    return [
        at_least(f"sessions per CPU second, {name}", speed, "1/s", LIMIT_SESSIONS_PER_SECOND),
        at_most(f"decision p50, {name}", _median_us(timed.decision_ns), "us", LIMIT_CHAINS_US),
    ]


def chains_of(servers: int) -> ChainsCluster:
    """Returns a cluster like the paper's, of two kinds of GPUs at different distances."""
    model = DecoderModel("BLOOM-176B", 70, 1.32, 0.11, 14336, 2466437120)
    big = GpuSlice("3g.40gb", 40, 120, 1.02, 109)
    small = GpuSlice("2g.20gb", 20, 80, 0.51, 175)
    places = [
        ServerSite(f"server-{number}", big if number % 5 == 0 else small, 10.0 + 37 * number % 50)
        for number in range(servers)
    ]
    return cluster_of(model, places, CommunicationCost())


def _placement() -> list[Figure]:
    """Returns the ratio of virtual to CPU time in one run, and the time of its decisions."""
    scenario = FILES.load(PLACEMENT)
    assert isinstance(scenario, Fewest)
    figures = []
    for policy in ("slo", "jsq"):
        case = next(
            row.case
            for row in rows_of(scenario)
            if row.policy == policy and row.rate_per_s == PLACEMENT_RATE
        )
        workload = case.workload()
        began = time.process_time()
        served = serve_placement(run_of(case, PLACEMENT_WORKERS, None), workload)
        times = served.simulated_s / (time.process_time() - began)
        timed = serve_placement(run_of(case, PLACEMENT_WORKERS, None, timed=True), workload)
        name = f"{PLACEMENT_WORKERS} workers, {PLACEMENT_RATE:g} requests/s, {policy}"
        middle = _median_us(timed.decision_ns)
        figures.append(at_least(f"times real time, {name}", times, "x", LIMIT_TIMES_REAL_TIME))
        figures.append(at_most(f"decision p50, {name}", middle, "us", LIMIT_PLACEMENT_US))
    return figures


def _median_us(decisions_ns: Sequence[int]) -> float:
    return sorted(decisions_ns)[len(decisions_ns) // 2] / 1000
