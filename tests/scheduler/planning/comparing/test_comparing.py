"""What placements promise, which is the better one, and why an agent is idle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.planning import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
)
from catenary_scheduler.planning.comparing import (
    better,
    candidate,
    idle_reasons,
    promise_of,
    with_idle_agents,
)
from catenary_scheduler.planning.pooled.problem import GpuClass, PooledModel, PoolingProblem
from catenary_services.domain.ids import AgentId, ModelKey

KEY, OTHER = ModelKey("m", "1"), ModelKey("o", "1")
NEW, OLD, SECOND_OLD = AgentId("new"), AgentId("old-1"), AgentId("old-2")
GROUPS = {NEW: "L4", OLD: "P4", SECOND_OLD: "P4"}
SLOW_US = 3_000.0


def times(per_block_us: float) -> np.ndarray:
    return np.full((4, 1), per_block_us)


def task(*models: PooledModel) -> PoolingProblem:
    return PoolingProblem((GpuClass("L4", 1), GpuClass("P4", 2)), models)


def model(key: ModelKey = KEY, slo_us: float = 1e6, weight: float = 1.0) -> PooledModel:
    latency = {("L4", 1): times(1_000.0), ("P4", 1): times(SLOW_US)}
    return PooledModel(str(key), 4, latency, (0, 0, 0, 0, 0), slo_us, weight=weight)


def placed(*pipelines: PipelinePlacement, key: ModelKey = KEY) -> ModelPlacement:
    return ModelPlacement(key, 10**9, False, pipelines)


def pipeline(*stages: tuple[int, int, tuple[AgentId, ...]]) -> PipelinePlacement:
    return PipelinePlacement(1, tuple(StagePlacement(*stage) for stage in stages))


WHOLE = Placement((placed(pipeline((0, 4, (NEW,))), pipeline((0, 4, (OLD, SECOND_OLD)))),))
CUT = Placement((placed(pipeline((0, 2, (OLD, SECOND_OLD)), (2, 4, (NEW,)))),))


def test_pools_of_their_own_serve_at_the_pace_of_their_class() -> None:
    # 4 ms on the new device, 12 ms on each of the old ones.
    found = promise_of(task(model()), WHOLE, GROUPS)
    assert found.objective == pytest.approx(250.0 + 2 * 1000 / 12)


def test_a_pipeline_serves_what_its_slowest_pool_does() -> None:
    found = promise_of(task(model()), CUT, GROUPS)
    assert found.objective == pytest.approx(2 * 1000 / 6)
    assert found.latency_us[str(KEY)] == pytest.approx(2 * SLOW_US + 2_000.0)


def test_a_pipeline_that_is_too_slow_promises_nothing_and_its_agents_are_idle() -> None:
    problem = task(model(slo_us=10_000.0))
    found = promise_of(problem, WHOLE, GROUPS)
    assert found.objective == pytest.approx(250.0)
    why = idle_reasons(problem, found.in_time, GROUPS)
    assert why.keys() == {OLD, SECOND_OLD}
    assert "takes 12.0 ms on P4" in why[OLD]
    assert "an objective of 12 ms" in why[OLD]


def test_models_that_share_agents_share_their_time() -> None:
    both = Placement((*WHOLE.models, replace(WHOLE.models[0], model=OTHER)))
    problem = task(model(weight=0.75), model(OTHER, weight=0.25))
    found = promise_of(problem, both, GROUPS)
    assert found.objective == pytest.approx(250.0 + 2 * 1000 / 12)
    assert found.throughput_rps[str(KEY)] >= 0.75 * found.objective * (1 - 1e-6)


def test_what_survives_the_loss_of_an_agent_comes_before_what_serves_more() -> None:
    problem = task(model())
    whole, cut = candidate(problem, WHOLE, GROUPS), candidate(problem, CUT, GROUPS)
    assert (whole.fragile_models, cut.fragile_models) == (0, 1)
    faster = replace(cut, promise=replace(cut.promise, objective=1_000.0))
    assert better(whole, faster) is whole
    assert better(whole, faster, survival_first=False) is faster


def test_pools_are_taken_where_whole_models_are_too_slow() -> None:
    problem = task(
        replace(
            model(slo_us=9_000.0), latency_us={("L4", 1): times(2_500.0), ("P4", 1): times(2_000.0)}
        )
    )
    slow = candidate(problem, Placement((placed(pipeline((0, 4, (NEW,)))),)), GROUPS)
    cut = candidate(problem, Placement((placed(pipeline((0, 4, (OLD, SECOND_OLD)))),)), GROUPS)
    assert slow.promise.objective == 0.0
    assert better(slow, cut) is cut


def test_an_agent_that_no_pool_uses_hosts_the_whole_model() -> None:
    alone = Placement((placed(pipeline((0, 4, (NEW,)))),))
    (found,) = with_idle_agents(alone, WHOLE, (OLD,)).models
    assert [stage.agents for each in found.pipelines for stage in each.stages] == [(NEW,), (OLD,)]


@given(st.lists(st.floats(100.0, 1e5), min_size=2, max_size=2), st.floats(1.1, 8.0))
def test_a_faster_class_never_promises_less(pace: list[float], factor: float) -> None:
    slow = replace(
        model(slo_us=1e9), latency_us={("L4", 1): times(pace[0]), ("P4", 1): times(pace[1])}
    )
    fast = replace(slow, latency_us={**slow.latency_us, ("P4", 1): times(pace[1] / factor)})
    before = promise_of(task(slow), CUT, GROUPS).objective
    assert promise_of(task(fast), CUT, GROUPS).objective >= before * (1 - 1e-6)
