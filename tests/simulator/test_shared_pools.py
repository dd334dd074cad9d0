"""Bursts in pools shared by two models, beside pools of their own, without noise."""

from __future__ import annotations

from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_scheduler.planning.pooled.shared_routes import with_shared_routes
from catenary_simulator import (
    GammaArrivals,
    PoissonArrivals,
    SimulationOptions,
    SimulationResult,
    simulate,
)
from scheduling_cases.tiny_pools import gpu_class, model, partition, pipeline, plan

BASE = {"m": 900.0, "n": 900.0}
"""What the pools of each model carry at most: 1000 requests per second of single rows."""


def two_alike() -> tuple[PoolingProblem, PooledPlan]:
    """Two models, each on four slow GPUs and two fast ones of its own."""
    blocks = {"fast": 1.0, "slow": 2.0}
    problem = PoolingProblem(
        (gpu_class("fast", 4), gpu_class("slow", 8)),
        tuple(model(name, slo_ms=40, block_ms=blocks, cut_bytes=100_000) for name in "mn"),
    )
    stages = (partition("slow", 1, (0, 2), 4), partition("fast", 1, (2, 4), 2))
    return problem, plan({name: [pipeline(1, 1000.0, *stages, latency_ms=6.1)] for name in "mn"})


def both(options: SimulationOptions) -> tuple[SimulationResult, SimulationResult]:
    """Returns a run with pools of their own, and one with shared ones."""
    problem, own = two_alike()
    return simulate(problem, own, options), simulate(
        problem, with_shared_routes(problem, own), options
    )


def test_bursts_are_served_by_both_models_pools_and_nothing_is_late() -> None:
    options = SimulationOptions(BASE, 0.5, 6.0, seed=3, arrivals=GammaArrivals(4.0))
    own, shared = both(options)
    assert shared.counters["shared_batches"] > 100
    assert own.counters["shared_batches"] == 0
    for before, after in zip(own.models, shared.models, strict=True):
        assert after.late == 0
        refused_before, refused = before.dropped, after.dropped
        assert refused < 0.5 * refused_before


def test_under_even_arrivals_neither_model_is_worse_off() -> None:
    options = SimulationOptions(BASE, 1.0, 4.0, seed=3, arrivals=PoissonArrivals())
    own, shared = both(options)
    for before, after in zip(own.models, shared.models, strict=True):
        assert after.late == 0
        assert after.attainment >= before.attainment - 0.005


def test_a_model_within_its_share_is_served_though_the_other_asks_for_thrice_its_pools() -> None:
    options = SimulationOptions(
        {"m": 3000.0, "n": 650.0}, 1.0, 3.0, seed=3, arrivals=PoissonArrivals()
    )
    own, shared = both(options)
    assert shared.model("n").attainment >= 0.99
    assert shared.model("m").finished > 1.1 * own.model("m").finished
