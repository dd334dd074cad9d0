"""AlpaServe's placement on small clusters: what it hosts, where, and how its simulation serves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_lab.pools.alpa_serve import (
    TARGET,
    Groups,
    Hosted,
    Load,
    PlacementFinder,
    merged,
    plan_alpa_serve,
)
from catenary_lab.scenarios.pools.jobs import with_equal_rights
from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    PooledModel,
    PooledPipeline,
    PoolingProblem,
)
from catenary_services.errors import PlanInfeasible
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.options import SimulationOptions
from catenary_simulator.simulate import run, set_up

BLOCKS, BATCHES = 4, 4


def model(name: str, block_us: float, weight: float = 0.5, block_bytes: int = 0) -> PooledModel:
    """Returns a model of equal blocks, twice as slow on "slow", for which batches save a half."""
    batch = 0.5 + 0.5 * np.arange(1, BATCHES + 1)
    times = {
        (gpu, 1): np.full((BLOCKS, 1), block_us * factor) * batch
        for gpu, factor in (("fast", 1.0), ("slow", 2.0))
    }
    cuts = (0, *[1000] * (BLOCKS - 1), 0)
    slo_us = 40 * block_us
    return PooledModel(
        name,
        BLOCKS,
        times,
        cuts,
        slo_us,
        0.4 * slo_us,
        weight,
        block_weight_bytes=(block_bytes,) * BLOCKS,
    )


def problem(*models: PooledModel, memory: int | None = None, gpus: int = 4) -> PoolingProblem:
    """Returns the task of serving these models on `gpus` fast GPUs and as many slow ones."""
    classes = tuple(GpuClass(name, gpus, memory_bytes=memory) for name in ("fast", "slow"))
    return PoolingProblem(classes, models, 2)


TWO = problem(model("cats", 1000), model("dogs", 2000))


def test_models_take_turns_on_gpus_that_are_in_one_group_each() -> None:
    plan = plan_alpa_serve(TWO)
    setting = with_equal_rights(set_up(TWO, plan))
    assert len(setting.agents) <= 8
    hosts = Counter[frozenset[str]]()
    for served in setting.plan.models:
        assert served.pipelines
        for pipeline in served.pipelines:
            assert not pipeline.is_shared
            hosts[frozenset(str(agent) for stage in pipeline.stages for agent in stage.agents)] += 1
    groups = list(hosts)
    assert all(not (a & b) for at, a in enumerate(groups) for b in groups[at + 1 :])
    # Nothing is kept back by memory, so it pays that some groups have both.
    assert max(hosts.values()) == 2


def test_what_is_promised_is_served_in_the_simulator() -> None:
    plan = plan_alpa_serve(TWO)
    setting = with_equal_rights(set_up(TWO, plan))
    base = {each.name: each.weight * plan.objective for each in TWO.models}
    options = SimulationOptions(base, 0.8, 2.0, 1, parse_arrivals("poisson"))
    assert all(each.attainment >= TARGET for each in run(setting, options).models)


def test_a_plan_is_the_same_every_time() -> None:
    assert replace(plan_alpa_serve(TWO), seconds=0.0) == replace(plan_alpa_serve(TWO), seconds=0.0)


def test_a_gpu_hosts_no_more_than_fits_into_its_memory() -> None:
    task = problem(model("cats", 1000, block_bytes=10), model("dogs", 2000, block_bytes=10))
    room = replace(task, classes=tuple(replace(gpu, memory_bytes=40) for gpu in task.classes))
    plan = plan_alpa_serve(room)
    for served in plan.models:
        for pipeline in (*served.pipelines, *(route.pipeline for route in served.shared)):
            for part in pipeline.partitions:
                assert 10 * (part.last_block - part.first_block) <= 40
    # One whole model fills a GPU, and so do halves of both on two.
    for served in plan.models:
        for route in served.shared:
            assert len(route.pipeline.partitions) == 2


def test_a_model_too_large_for_one_gpu_is_cut_over_a_group() -> None:
    task = problem(model("cats", 1000, weight=1.0, block_bytes=10), memory=20)
    plan = plan_alpa_serve(task)
    assert all(len(each.partitions) == 2 for each in plan.models[0].pipelines)


def test_a_model_that_fits_nowhere_has_no_plan() -> None:
    with pytest.raises(PlanInfeasible):
        plan_alpa_serve(problem(model("cats", 1000, weight=1.0, block_bytes=10), memory=9))


def test_groups_of_the_same_models_are_counted_together() -> None:
    hosted = _hosted(10.0, 5.0)
    made = merged(
        [
            Groups("fast", 1, 2, {0: hosted}),
            Groups("fast", 1, 3, {0: hosted, 1: hosted}),
            Groups("fast", 1, 4, {0: hosted}),
            Groups("slow", 1, 5, {0: hosted}),
        ]
    )
    assert sorted((each.gpu, each.count, len(each.hosted)) for each in made) == [
        ("fast", 3, 2),
        ("fast", 6, 1),
        ("slow", 5, 1),
    ]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sets(st.integers(0, 1), min_size=1)),
        min_size=1,
        max_size=3,
    ),
    st.floats(50.0, 2000.0),
)
def test_the_simulation_serves_as_one_that_looks_at_every_group(
    kinds: list[tuple[int, set[int]]], scale: float
) -> None:
    load = Load(TWO, 3)
    placed = [
        Groups("fast", 1, count, {m: _hosted(4000.0 + 1000 * m, 2000.0 + 100 * at) for m in models})
        for at, (count, models) in enumerate(kinds)
    ]
    trial = PlacementFinder(TWO, load, (1, 1)).simulate(placed, scale)
    assert trial.missed == _missed(load, placed, scale)
    assert 0.0 <= trial.attainment <= 1.0


def _hosted(latency_us: float, occupied_us: float) -> Hosted:
    return Hosted(PooledPipeline(1, 1e6 / occupied_us, latency_us, ()), (0,))


def _missed(load: Load, placed: list[Groups], scale: float) -> list[int]:
    """Serves request by request, with the moment at which each single group is free."""
    free = [[each, 0.0] for each in placed for _ in range(each.count)]
    missed, now = [0, 0], 0.0
    for number, gap in zip(load.models, load.gaps, strict=True):
        now += gap * 1e6 / scale
        hosts = [each for each in free if number in each[0].hosted]
        ends = [max(now, at) + group.hosted[number].latency_us for group, at in hosts]
        if not ends or min(ends) > now + load.slo_us[number]:
            missed[number] += 1
            continue
        # Of equally early ends that of the last kind, and there the one that is free first.
        least = min(ends)
        best = [each for each, end in zip(hosts, ends, strict=True) if end == least]
        kind = best[-1][0]
        chosen = min((each for each in best if each[0] is kind), key=lambda each: each[1])
        chosen[1] = max(now, chosen[1]) + kind.hosted[number].occupied_us
    return missed
