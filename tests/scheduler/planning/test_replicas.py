from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.planning import (
    DeployedModel,
    Placement,
    even_split,
    parse_placement,
    placement_document,
)
from catenary_scheduler.planning.replicas import replicated, why_unused, without_room
from catenary_services.domain.ids import AgentId, ModelKey, ServerId
from catenary_services.domain.model import BlockTable, Boundary
from catenary_services.domain.plan import Agent
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import PlanInfeasible

GIB = 1 << 30
BOUNDARY = Boundary((TensorSpec("x", "FP32", (ANY, 6)),), 24)


def model(
    *block_bytes: int, name: str = "cats", partitions: int | None = None, blocks: int = 4
) -> DeployedModel:
    blocks = len(block_bytes) or blocks
    table = BlockTable("h", True, (BOUNDARY,) * (blocks + 1), (1,) * blocks)
    return DeployedModel(
        ModelKey(name, "1"), table, 100_000_000, 8, True, partitions, block_bytes=block_bytes
    )


def agent(number: int, memory: int = GIB, device: str = "l4", server: str = "") -> Agent:
    return Agent(AgentId(f"a{number}"), device, ServerId(server or f"s{number}"), memory, 1)


def pools(placement: Placement, name: str = "cats") -> list[list[tuple[int, int, list[str]]]]:
    (found,) = [each for each in placement.models if each.model.name == name]
    return [
        [(s.first_block, s.last_block, list(s.agents)) for s in pipeline.stages]
        for pipeline in found.pipelines
    ]


def test_a_model_that_fits_is_whole_on_every_agent() -> None:
    placement = replicated([model(1, 1, 1)], [agent(n) for n in range(3)])
    assert pools(placement) == [[(0, 3, ["a0", "a1", "a2"])]]


def test_unknown_sizes_and_unknown_memory_are_taken_to_fit() -> None:
    assert pools(replicated([model()], [agent(0, 1), agent(1, 1)])) == [[(0, 4, ["a0", "a1"])]]
    unknown = [agent(0, 0), agent(1, 0)]
    assert pools(replicated([model(GIB, GIB)], unknown)) == [[(0, 2, ["a0", "a1"])]]


def test_unlike_devices_have_pools_of_their_own() -> None:
    cluster = [agent(0, device="l4"), agent(1, device="p4"), agent(2, device="l4")]
    assert pools(replicated([model(1)], cluster)) == [[(0, 1, ["a0", "a2"])], [(0, 1, ["a1"])]]


def test_a_named_number_of_partitions_is_kept() -> None:
    placement = replicated([model(1, 1, 1, partitions=3)], [agent(n) for n in range(3)])
    assert [len(pipeline) for pipeline in pools(placement)] == [3]


def test_a_model_too_large_for_any_agent_is_cut_as_little_as_memory_allows() -> None:
    blocks = (GIB // 4,) * 6  # 1.8 GiB with what running needs, on agents of 0.9 GiB
    placement = replicated([model(*blocks)], [agent(n) for n in range(4)])
    (pipeline,) = pools(placement)
    assert [(first, last) for first, last, _ in pipeline] == [(0, 3), (3, 6)]
    assert [len(members) for _, _, members in pipeline] == [2, 2]


def test_small_agents_are_a_pipeline_beside_a_large_one() -> None:
    blocks = (GIB // 4,) * 4
    cluster = [agent(0, 4 * GIB), agent(1), agent(2)]
    assert pools(replicated([model(*blocks)], cluster)) == [
        [(0, 4, ["a0"])],
        [(0, 2, ["a1"]), (2, 4, ["a2"])],
    ]


def test_what_fits_nowhere_is_tried_all_the_same() -> None:
    placement = replicated([model(9 * GIB, 9 * GIB, 9 * GIB)], [agent(n) for n in range(3)])
    assert [len(pipeline) for pipeline in pools(placement)] == [3]


def test_every_model_has_a_replica_before_any_has_two_and_two_on_different_servers() -> None:
    half = GIB * 4 // 10
    models = [model(half, name=name) for name in ("cats", "dogs")]
    cluster = [agent(0, server="s"), agent(1, server="s"), agent(2, server="t")]
    placement = replicated(models, cluster)
    held = Counter(
        a for each in placement.models for p in each.pipelines for a in p.stages[0].agents
    )
    assert max(held.values()) <= 1  # two do not fit beside each other
    assert all(each.pipelines for each in placement.models)
    alone = pools(replicated([model(half)], cluster, memory_share=0.9))
    assert alone == [[(0, 1, ["a0", "a1", "a2"])]]


def test_room_is_left_for_others() -> None:
    placement = replicated([model(GIB // 2)], [agent(0), agent(1)], memory_share=0.4)
    assert pools(placement) == [[(0, 1, ["a0", "a1"])]]  # fits nowhere by its size: tried anyway


def test_no_agent_is_infeasible() -> None:
    with pytest.raises(PlanInfeasible, match="no agent"):
        replicated([model(1)], [])


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.integers(0, 100), st.sampled_from("lp"), st.sampled_from("st")),
        min_size=1,
        max_size=6,
    ),
)
def test_pipelines_cover_the_model_and_replicas_fit(
    sizes: list[list[int]], devices: list[tuple[int, str, str]]
) -> None:
    models = [model(*blocks, name=f"m{n}") for n, blocks in enumerate(sizes)]
    cluster = [agent(n, *device) for n, device in enumerate(devices)]
    placement = replicated(models, cluster)
    for wanted, placed in zip(models, placement.models, strict=True):
        size = 1.2 * sum(wanted.block_bytes)
        able = {a.agent_id for a in cluster if not a.memory_bytes or size <= 0.9 * a.memory_bytes}
        whole = [a for p in placed.pipelines if len(p.stages) == 1 for a in p.stages[0].agents]
        assert placed.pipelines
        assert len(whole) == len(set(whole))
        assert len(models) > 1 or not able or set(whole) == able
        for pipeline in placed.pipelines:
            edges = [0, *(stage.last_block for stage in pipeline.stages)]
            assert [stage.first_block for stage in pipeline.stages] == edges[:-1]
            assert edges[-1] == wanted.table.blocks
            assert all(stage.agents for stage in pipeline.stages)
    everything = 1.2 * sum(sum(each.block_bytes) for each in models)
    if all(not a.memory_bytes or everything <= 0.9 * a.memory_bytes for a in cluster):
        everyone = {a.agent_id for a in cluster}
        for placed in placement.models:
            assert {a for p in placed.pipelines for a in p.stages[0].agents} == everyone
    assert parse_placement(placement_document(placement)) == placement


def test_an_agent_that_gets_nothing_is_told_what_it_lacks() -> None:
    small = agent(1, memory=GIB // 2)
    placement = replicated([model(GIB // 4, GIB // 4)], [agent(0), small])
    assert pools(placement) == [[(0, 2, ["a0"])]]
    why = why_unused([model(GIB // 4, GIB // 4), model(1, name="dogs", partitions=2)], small)
    assert "cats:1 takes 644 MB as a whole and it has 483 MB for models" in why
    assert "dogs:1 was deployed in 2 partition(s), which others host" in why


def test_an_agent_has_room_for_all_of_its_parts_or_not() -> None:
    models, agents = [model(GIB // 2, GIB // 2)], [agent(0), agent(1, memory=GIB // 2)]
    cut = even_split(models, agents)
    assert pools(cut) == [[(0, 1, ["a0"]), (1, 2, ["a1"])]]
    assert without_room(models, cut, agents) == ["a1"]
    assert without_room(models, cut, [agent(0), agent(1)]) == []
    whole = even_split(models, agents[:1])
    assert without_room(models, whole, agents) == ["a0"]
