"""Simulated gateways dispatch by windows as real ones do, and no request is worse off for it."""

from __future__ import annotations

import pytest

from catenary_scheduler.dispatch import PooledConfig
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_simulator import Disturbance, SimulationOptions, SimulationResult, simulate
from catenary_simulator.options import SIMULATED
from scheduling_cases.tiny_pools import gpu_class, model, partition, pipeline, plan

ROUGH = Disturbance(compute_cv=0.2, transfer_cv=0.2, report_delay_ns=300_000)
WINDOWS, NONE = PooledConfig(), PooledConfig(longest_window_ns=0)


def one_path() -> tuple[PoolingProblem, PooledPlan]:
    """One GPU after another; a row takes 0.4 ms, and 8,000 a second saturate both."""
    problem = PoolingProblem(
        (gpu_class("fast", 1), gpu_class("slow", 1)),
        (model("m", slo_ms=200, block_ms={"fast": 0.1, "slow": 0.1}, cut_bytes=1000),),
    )
    stages = (partition("slow", 1, (0, 2), 1), partition("fast", 1, (2, 4), 1))
    return problem, plan({"m": [pipeline(4, 8000.0, *stages, latency_ms=2)]})


def two_models() -> tuple[PoolingProblem, PooledPlan]:
    """Two models with a GPU each for their heads, and one for both of their tails."""
    problem = PoolingProblem(
        (gpu_class("fast", 4),),
        (
            model("m", slo_ms=100, block_ms={"fast": 0.2}, cut_bytes=1000),
            model("n", slo_ms=100, block_ms={"fast": 0.3}, cut_bytes=1000),
        ),
    )
    stages = (partition("fast", 1, (0, 2), 1), partition("fast", 1, (2, 4), 1))
    pipes = {name: [pipeline(4, 2000.0, *stages, latency_ms=2)] for name in ("m", "n")}
    return problem, plan(pipes)


def run(
    which: tuple[PoolingProblem, PooledPlan],
    load: float,
    config: PooledConfig,
    disturbance: Disturbance | None = None,
) -> SimulationResult:
    rates = {each.name: 2000.0 for each in which[0].models}
    return simulate(
        *which,
        SimulationOptions(
            rates,
            load,
            1.0,
            disturbance=disturbance or Disturbance(),
            config=config,
        ),
    )


@pytest.mark.parametrize("disturbance", [None, ROUGH])
@pytest.mark.parametrize("load", [0.1, 0.6, 2.0])
def test_windows_make_no_request_late(load: float, disturbance: Disturbance | None) -> None:
    with_windows = run(one_path(), load, WINDOWS, disturbance)
    without = run(one_path(), load, NONE, disturbance)
    assert with_windows.counters["window_requests"] > 0
    mine, theirs = with_windows.model("m"), without.model("m")
    assert mine.requests == theirs.requests
    assert mine.attainment >= theirs.attainment - 0.002
    assert mine.p50_ms is not None
    assert theirs.p50_ms is not None
    assert mine.p50_ms <= theirs.p50_ms + 0.1


def test_a_lone_request_neither_lingers_nor_asks() -> None:
    with_windows, without = run(one_path(), 0.2, WINDOWS), run(one_path(), 0.2, NONE)
    mine, theirs = with_windows.model("m"), without.model("m")
    assert mine.p50_ms is not None
    assert theirs.p50_ms is not None
    assert mine.p50_ms < theirs.p50_ms / 2  # most of which is waiting for company
    assert with_windows.counters["arrived_requests"] < without.counters["arrived_requests"] / 2


@pytest.mark.parametrize("load", [0.05, 0.5])
def test_models_beside_each_other_keep_their_deadlines(load: float) -> None:
    with_windows, without = run(two_models(), load, WINDOWS), run(two_models(), load, NONE)
    for name in ("m", "n"):
        mine, theirs = with_windows.model(name), without.model(name)
        assert mine.attainment >= theirs.attainment - 0.002


def test_the_papers_waiting_rule_leaves_no_room_for_windows() -> None:
    result = run(one_path(), 0.2, SIMULATED)
    assert result.counters["granted_windows"] == 0
