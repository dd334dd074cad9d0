from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.planning import (
    DeployedModel,
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
    balanced_ranges,
    complete_plan,
    even_split,
    parse_placement,
    placement_document,
)
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, PlanId, ServerId
from catenary_services.domain.model import BlockTable, Boundary, TokenUnits
from catenary_services.domain.plan import Agent
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import PlanInfeasible

MS = 1_000_000
CATS = ModelKey("cats", "1")


def table(*times: int, batched: bool = True) -> BlockTable:
    tensors = (TensorSpec("x", "FP32", (ANY, 6)), TensorSpec("n", "INT64", (ANY, 1)))
    return BlockTable("h", batched, (Boundary(tensors, 32),) * (len(times) + 1), times)


def deployed(
    *times: int, key: ModelKey = CATS, partitions: int | None = None, batched: bool = True
) -> DeployedModel:
    return DeployedModel(key, table(*times, batched=batched), 100 * MS, 8, True, partitions)


def agents(count: int) -> list[Agent]:
    return [Agent(AgentId(f"a{i}"), "x", ServerId("s"), 1, 1) for i in range(count)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_ranges_are_as_balanced_as_any_cut_can_make_them(
    times: list[int], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(times)))
    ranges = balanced_ranges(times, parts)
    assert len(ranges) == parts
    assert [at for pair in ranges for at in pair[:1]] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == len(times)
    assert all(first < last for first, last in ranges)

    def worst(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(times))
        return max(sum(times[a:b]) for a, b in pairwise(edges))

    best = min(worst(cuts) for cuts in combinations(range(1, len(times)), parts - 1))
    assert max(sum(times[a:b]) for a, b in ranges) == best


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_every_agent_is_used_and_every_partition_has_one(
    times: list[int], count: int, partitions: int | None
) -> None:
    model = deployed(*times, partitions=partitions)
    placement = even_split([model], agents(count))
    (pipeline,) = placement.models[0].pipelines
    wanted = min(partitions or min(count, 3), len(times))
    assert len(pipeline.stages) == wanted
    assert (
        {agent for stage in pipeline.stages for agent in stage.agents}
        == {agent.agent_id for agent in agents(count)}
        or count > wanted > len(times)
        or count < 1
    )
    assert all(stage.agents for stage in pipeline.stages)
    if count >= wanted:
        hosted = [agent for stage in pipeline.stages for agent in stage.agents]
        assert len(hosted) == len(set(hosted)) == count
    assert parse_placement(placement_document(placement)) == placement


def test_pools_grow_with_the_time_of_their_partition() -> None:
    placement = even_split([deployed(10, 40, 10, partitions=3)], agents(6))
    assert [len(stage.agents) for stage in placement.models[0].pipelines[0].stages] == [1, 4, 1]


def test_models_share_all_agents_and_start_at_different_ones() -> None:
    models = [deployed(1, 1), deployed(1, 1, key=ModelKey("dogs", "1"))]
    placement = even_split(models, agents(2))
    first = [model.pipelines[0].stages[0].agents for model in placement.models]
    assert first == [("a0",), ("a1",)]


def test_a_model_without_a_batch_dimension_gets_batches_of_one() -> None:
    placement = even_split([deployed(1, 1, batched=False)], agents(2))
    assert placement.models[0].pipelines[0].batch_size == 1


def test_no_agents_is_infeasible() -> None:
    with pytest.raises(PlanInfeasible, match="no agent"):
        even_split([deployed(1)], [])


def placed(slo_ms: float, batch: int = 4, float16: bool = True, end: int = 2) -> Placement:
    stages = (
        StagePlacement(0, 1, (AgentId("a0"),)),
        StagePlacement(1, end, (AgentId("a1"), AgentId("a2"))),
    )
    pipelines = (PipelinePlacement(batch, stages),)
    return Placement((ModelPlacement(CATS, int(slo_ms * MS), float16, pipelines),))


FIRST, SECOND = PartitionKey(CATS, 0, 1), PartitionKey(CATS, 1, 2)
TIMES = {
    (AgentId("a0"), FIRST): (10 * MS, 12 * MS, 14 * MS, 16 * MS),
    (AgentId("a1"), SECOND): (10 * MS, 12 * MS, 14 * MS, 16 * MS),
    (AgentId("a2"), SECOND): (20 * MS, 22 * MS, 21 * MS, 26 * MS, 30 * MS),
}


def test_a_stage_is_as_slow_as_its_slowest_agent_and_never_faster_for_more_rows() -> None:
    plan = complete_plan(placed(100), {CATS: table(1, 1)}, TIMES, PlanId("p"))
    first, second = plan.models[0].pipelines[0].stages
    assert first.compute_ns == (10 * MS, 12 * MS, 14 * MS, 16 * MS)
    assert second.compute_ns == (20 * MS, 22 * MS, 22 * MS, 26 * MS)
    assert plan.plan_id == "p"


@pytest.mark.parametrize(("float16", "expected"), [(True, 6 * 2 + 8), (False, 32)])
def test_only_inner_boundaries_are_counted_and_in_wire_size(float16: bool, expected: int) -> None:
    plan = complete_plan(placed(100, float16=float16), {CATS: table(1, 1)}, TIMES, PlanId("p"))
    assert [stage.input_bytes for stage in plan.models[0].pipelines[0].stages] == [0, expected]


@pytest.mark.parametrize(("slo_ms", "batch"), [(100, 4), (42, 4), (41, 3), (35, 2), (30, 1)])
def test_the_batch_is_lowered_to_what_meets_the_slo(slo_ms: float, batch: int) -> None:
    plan = complete_plan(placed(slo_ms), {CATS: table(1, 1)}, TIMES, PlanId("p"))
    assert plan.models[0].pipelines[0].batch_size == batch


def test_the_batch_is_lowered_to_what_was_measured() -> None:
    plan = complete_plan(placed(100, batch=9), {CATS: table(1, 1)}, TIMES, PlanId("p"))
    assert plan.models[0].pipelines[0].batch_size == 4


def test_an_slo_below_one_row_is_infeasible_and_says_so() -> None:
    with pytest.raises(PlanInfeasible, match=r"cats:1: SLO of 29 ms .* takes 30\.000 ms"):
        complete_plan(placed(29), {CATS: table(1, 1)}, TIMES, PlanId("p"))


UNITS = TokenUnits(16, 64)
"""Texts of up to 64 tokens: four units."""
BY_UNIT = {
    (AgentId("a0"), FIRST): tuple(10 * MS + at * MS for at in range(8)),
    (AgentId("a1"), SECOND): tuple(10 * MS + at * MS for at in range(8)),
    (AgentId("a2"), SECOND): tuple(10 * MS + at * MS for at in range(12)),
}


@pytest.mark.parametrize(
    ("slo_ms", "batch", "size"), [(100, 2, 8), (100, 1, 4), (100, 9, 8), (31, 2, 6), (26, 2, 4)]
)
def test_batches_of_texts_are_counted_in_units_and_have_room_for_full_ones(
    slo_ms: float, batch: int, size: int
) -> None:
    texts = replace(table(1, 1), units=UNITS)
    (model,) = complete_plan(placed(slo_ms, batch), {CATS: texts}, BY_UNIT, PlanId("p")).models
    assert (model.units, model.row_units) == (UNITS, 4)
    assert model.pipelines[0].batch_size == size
    assert model.pipelines[0].stages[1].input_bytes == (6 * 2 + 8) // 4


def test_an_slo_below_a_text_of_full_length_is_infeasible() -> None:
    tables = {CATS: replace(table(1, 1), units=UNITS)}
    with pytest.raises(PlanInfeasible, match=r"SLO of 25 ms .* takes 26\.000 ms"):
        complete_plan(placed(25), tables, BY_UNIT, PlanId("p"))
    few = {key: times[:3] for key, times in BY_UNIT.items()}
    with pytest.raises(PlanInfeasible, match="not measured up to a text of full length"):
        complete_plan(placed(100), tables, few, PlanId("p"))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(PlanInfeasible, match="no block table"):
        complete_plan(placed(100), {}, TIMES, PlanId("p"))
    times = {key: value for key, value in TIMES.items() if key[0] != "a2"}
    with pytest.raises(PlanInfeasible, match=r"cats:1\[1,2\): not measured on agent a2"):
        complete_plan(placed(100), {CATS: table(1, 1)}, times, PlanId("p"))
    with pytest.raises(PlanInfeasible, match="end at 2 of 3 blocks"):
        complete_plan(placed(100), {CATS: table(1, 1, 1)}, TIMES, PlanId("p"))
