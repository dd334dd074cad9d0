"""Routes through pools of other models: the best cut, memory, and turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning.pooled import plan_pools
from catenary_scheduler.planning.pooled.layout.layout import lay_out
from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    PooledModel,
    PooledPartition,
    PooledPlan,
    PoolingProblem,
)
from catenary_scheduler.planning.pooled.shared_routes import (
    MOST_CUTS,
    MOST_ROUTES,
    HostPool,
    fit,
    with_shared_routes,
)
from catenary_scheduler.planning.pooled.timing import (
    batch_building_us,
    compute_us,
    pool_rate_rps,
    transfer_us,
)
from catenary_services.errors import PlanInfeasible
from scheduling_cases.pooled_problems import random_problem
from scheduling_cases.tiny_pools import gpu_class, model, partition, pipeline, plan

SEEDS = st.integers(0, 10_000)


def best_rate(of: PooledModel, pools: tuple[HostPool, ...], classes: dict[str, GpuClass]) -> float:
    """Returns the best rate over all cuts and batches within the SLO, one by one."""
    best = 0.0
    most = min(of.latency_us[pool.gpu, pool.level].shape[1] for pool in pools)
    for inner in combinations(range(1, of.blocks), len(pools) - 1):
        parts = [
            PooledPartition(pool.gpu, pool.level, *blocks, pool.members, 1.0)
            for pool, blocks in zip(pools, pairwise((0, *inner, of.blocks)), strict=True)
        ]
        for batch in range(1, most + 1):
            latency = batch_building_us(of, batch) + sum(compute_us(of, p, batch) for p in parts)
            for one, other in pairwise(parts):
                cut = of.cut_bytes[other.first_block]
                latency += batch * transfer_us(cut, classes[one.gpu], classes[other.gpu])
            if latency <= of.slo_us:
                rates = [pool_rate_rps(of, classes[p.gpu], p, batch) for p in parts]
                best = max(best, min(rates))
    return best


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.integers(1, 3), st.floats(0.1, 2.0))
def test_a_fit_serves_as_much_as_the_best_of_all_cuts_and_batches(
    seed: int, stages: int, slo: float
) -> None:
    problem = random_problem(seed, blocks=4)
    classes = {gpu.name: gpu for gpu in problem.classes}
    guest = replace(problem.models[0], slo_us=problem.models[0].slo_us * slo)
    kinds = [
        HostPool(gpu.name, level, 1 + at)
        for gpu in problem.classes
        for at, level in enumerate(gpu.levels)
    ]
    pools = tuple((kinds * 3)[seed % len(kinds) :][:stages])
    found = fit(guest, pools, classes)
    best = best_rate(guest, pools, classes)
    assert (found.throughput_rps if found is not None else 0.0) == pytest.approx(best)
    if found is not None:
        assert found.latency_us <= guest.slo_us
        assert [part.vgpus for part in found.partitions] == [pool.members for pool in pools]


def test_a_model_with_too_many_cuts_is_no_guest() -> None:
    blocks = 60
    guest = replace(
        model("m", slo_ms=1e6, block_ms={"fast": 1.0}),
        blocks=blocks,
        latency_us={("fast", 1): np.ones((blocks, 4))},
        cut_bytes=(0,) * (blocks + 1),
    )
    pool, classes = HostPool("fast", 1, 1), {"fast": gpu_class("fast", 8)}
    assert fit(guest, [pool] * 2, classes) is not None
    assert comb(blocks - 1, 7) > MOST_CUTS
    assert fit(guest, [pool] * 8, classes) is None


def two_models(memory: int | None, weights: int) -> tuple[PoolingProblem, PooledPlan]:
    """Two models, one on the fast GPUs and one on slow ones, then fast ones."""
    gpus = (gpu_class("fast", 4), gpu_class("slow", 4))
    made = [
        replace(
            model(name, slo_ms=60, block_ms={"fast": 1.0, "slow": 2.0}),
            block_weight_bytes=(weights,) * 4,
        )
        for name in ("m", "n")
    ]
    problem = PoolingProblem(tuple(replace(gpu, memory_bytes=memory) for gpu in gpus), tuple(made))
    mine = pipeline(1, 500.0, partition("fast", 1, (0, 4), 2))
    theirs = pipeline(
        1, 500.0, partition("slow", 1, (0, 2), 4), partition("fast", 2, (2, 4), 4), latency_ms=12
    )
    return problem, plan({"m": [mine], "n": [theirs]})


def test_each_model_has_a_route_through_the_pools_of_the_other() -> None:
    problem, own = two_models(None, 10)
    shared = with_shared_routes(problem, own)
    assert [[(r.host, r.host_pipeline) for r in each.shared] for each in shared.models] == [
        [(1, 0)],
        [(0, 0)],
    ]
    assert replace(shared, models=own.models) == own
    assert [replace(each, shared=()) for each in shared.models] == list(own.models)
    agents, laid_out = lay_out(problem, shared)
    m, n = laid_out.models
    assert [each.is_shared for each in m.pipelines] == [False, True]
    assert [stage.agents for stage in m.shared_pipelines[0].stages] == [
        stage.agents for stage in n.own_pipelines[0].stages
    ]
    assert len({each.pipeline_id for each in (*m.pipelines, *n.pipelines)}) == 4
    assert len(agents) == len({agent.agent_id for agent in agents})


def test_without_room_for_another_model_nothing_is_shared() -> None:
    # A whole fast GPU holds all of m, and half of one the blocks 2 and 3 of n.
    problem, own = two_models(40, 10)
    assert with_shared_routes(problem, own).models == own.models
    # Twice the room: four blocks beside four, and two beside two on the halves.
    problem, own = two_models(80, 10)
    assert all(each.shared for each in with_shared_routes(problem, own).models)


@settings(deadline=None, max_examples=40)
@given(SEEDS)
def test_memory_holds_all_that_a_gpu_hosts_and_guests_are_few(seed: int) -> None:
    problem = random_problem(seed, models=3, most_gpus=4)
    models = {each.name: each for each in problem.models}
    memory = {gpu.name: gpu.memory_bytes for gpu in problem.classes}
    try:
        own = plan_pools(problem)
    except PlanInfeasible:
        return
    shared = with_shared_routes(problem, own)
    hosted: dict[tuple[int, int, int], int] = {}
    guests: dict[tuple[int, int], int] = {}

    def host(where: tuple[int, int], name: str, parts: tuple[PooledPartition, ...]) -> None:
        for position, part in enumerate(parts):
            weights = models[name].block_weight_bytes[part.first_block : part.last_block]
            key = (*where, position)
            hosted[key] = hosted.get(key, 0) + sum(weights)
            limit = memory[part.gpu]
            assert limit is None or hosted[key] * part.level <= limit

    for at, each in enumerate(shared.models):
        for which, one in enumerate(each.pipelines):
            host((at, which), each.name, one.partitions)
    for at, each in enumerate(shared.models):
        assert len(each.shared) <= MOST_ROUTES
        for route in each.shared:
            where = (route.host, route.host_pipeline)
            assert route.host != at
            guests[where] = guests.get(where, 0) + 1
            pools = shared.models[route.host].pipelines[route.host_pipeline].partitions
            assert [(p.gpu, p.level, p.vgpus) for p in route.pipeline.partitions] == [
                (p.gpu, p.level, p.vgpus) for p in pools
            ]
            host(where, each.name, route.pipeline.partitions)
    assert max(guests.values(), default=0) <= MOST_ROUTES


def test_models_take_turns_where_room_is_scarce() -> None:
    """Three like models with room for one guest each: none gets two routes and another none."""
    gpu = replace(gpu_class("fast", 3), memory_bytes=80)
    made = tuple(
        replace(model(name, slo_ms=60, block_ms={"fast": 1.0}), block_weight_bytes=(10,) * 4)
        for name in "mno"
    )
    own = plan({name: [pipeline(1, 250.0, partition("fast", 1, (0, 4), 1))] for name in "mno"})
    shared = with_shared_routes(PoolingProblem((gpu,), made), own)
    assert [len(each.shared) for each in shared.models] == [1, 1, 1]
