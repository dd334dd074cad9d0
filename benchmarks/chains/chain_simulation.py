"""Server chains in simulation, compared with limits: speed, policies, choice of c, whole systems.

Speed is in sessions per second of CPU time, so that it does not depend on the load of the machine.
The rest reads the scenario files; the full form takes some ten minutes on two cores.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, at_least, at_most, table
from catenary_lab.scenarios.data import data_file
from catenary_lab.scenarios.runner import run_scenarios
from catenary_scheduler.planning.chains import best_composition
from catenary_services.errors import InvalidInput
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

WHOLE_TRACE = "AzureLLMInferenceTrace_code.csv"
SCENARIOS = Path(__file__).parents[2] / "scenarios" / "chains"
LIMIT_SESSIONS_PER_SECOND = 5_000.0
LIMIT_DECISION_US = 5.0
LIMIT_REGRET = 2.0
LIMIT_TIED = 0.99
"""The least ratio at light load, where Catenary and BPRR compose the same chains and chance decides
which is ahead."""
LIMIT_TRACE_GAIN = 1.0
LOAD = 0.8


def run(quick: bool) -> list[Figure]:
    """Returns the figures; the long form omits that of the trace if there is no trace."""
    figures = [*_speed(20, 20_000), *_speed(1_000, 20_000)]
    names = ["policies", "tuning", "systems"]
    if quick or _has_whole_trace():
        names.append("trace-tuned")
    paths = [SCENARIOS / f"{name}.yaml" for name in names]
    policies, tuning, systems, *tuned = (
        report.facts["policies"] for report in run_scenarios("chains", paths, quick=quick)
    )
    figures += [_policies(policies), _regret(tuning), *_systems(systems)]
    return [*figures, *map(_trace, tuned)]


def _has_whole_trace() -> bool:
    try:
        data_file(WHOLE_TRACE, "trace.file")
    except InvalidInput as error:
        print(f"chain simulation without trace-tuned: {error.message}")
        return False
    return True


def larger(servers: int) -> ChainsCluster:
    """Returns a cluster like the paper's, of two kinds of GPUs at different distances."""
    model = DecoderModel("BLOOM-176B", 70, 1.32, 0.11, 14336, 2466437120)
    big = GpuSlice("3g.40gb", 40, 120, 1.02, 109)
    small = GpuSlice("2g.20gb", 20, 80, 0.51, 175)
    places = [
        ServerSite(f"server-{number}", big if number % 5 == 0 else small, 10.0 + 37 * number % 50)
        for number in range(servers)
    ]
    return cluster_of(model, places, CommunicationCost())


def _speed(servers: int, sessions: int) -> list[Figure]:
    cluster = larger(servers)
    composition = best_composition(cluster.task(0.01 * servers))
    rate = LOAD * composition.total_rate_per_s
    workload = exponential(PoissonArrivals(), rate, (2000, 20), sessions, 1)
    began = time.process_time()
    serve_chains(cluster, composition, "jffc", workload)
    spent = time.process_time() - began
    timed = serve_chains(cluster, composition, "jffc", workload, time.perf_counter_ns)
    decisions = sorted(timed.decision_ns)
    name = f"{len(composition.chains)} chains, {servers:,} servers"
    return [
        at_least(
            f"sessions per CPU second, {name}", sessions / spent, "1/s", LIMIT_SESSIONS_PER_SECOND
        ),
        at_most(
            f"decision p50, {name}", decisions[len(decisions) // 2] / 1000, "us", LIMIT_DECISION_US
        ),
    ]


def _policies(facts: list[dict[str, Any]]) -> Figure:
    """Returns the ratio of the next best policy to JFFC, at the load where it is least."""
    nearest = min(
        fact["mean_response_s"] / mine["mean_response_s"]
        for mine in facts
        if mine["policy"] == "jffc"
        for fact in facts
        if fact["load"] == mine["load"] and fact["policy"] != "jffc"
    )
    return at_least("next best policy over JFFC, worst load", nearest, "times", LIMIT_TIED)


def _regret(facts: list[dict[str, Any]]) -> Figure:
    worst = max(100 * fact["regret"]["lower"] for fact in facts)
    return at_most("regret of c* by lower bound, worst load", worst, "%", LIMIT_REGRET)


def _systems(facts: list[dict[str, Any]]) -> list[Figure]:
    figures = []
    for rival in ("PETALS", "BPRR"):
        ratios = [
            theirs["mean_response_s"] / mine["mean_response_s"]
            for mine in facts
            if mine["label"] == "c*"
            for theirs in facts
            if theirs["case"] == mine["case"]
            and theirs["label"] == rival
            and theirs["mean_response_s"] is not None
        ]
        figures.append(
            at_least(f"{rival} over ours, worst cell of Fig. 8", min(ratios), "times", LIMIT_TIED)
        )
    return figures


def _trace(facts: list[dict[str, Any]]) -> Figure:
    """Returns the ratio of Poisson-tuned to trace-tuned c, for the worst part of the trace.

    The trace-tuned c is tuned on other requests than those that are served.
    """
    means = {(fact["case"], fact["label"]): fact["mean_response_s"] for fact in facts}
    worst = min(
        mean / means[case, "replay of others"]
        for (case, label), mean in means.items()
        if label == "lower bound"
    )
    return at_least(
        "Poisson-tuned over trace-tuned c, worst part", worst, "times", LIMIT_TRACE_GAIN
    )


def main() -> None:
    """Prints the table."""
    print(table(run(quick=False)))


if __name__ == "__main__":
    main()
