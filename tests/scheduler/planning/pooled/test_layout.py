"""Where a plan's virtual GPUs go: devices, servers, stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from catenary_scheduler.planning.pooled.layout.layout import lay_out
from catenary_scheduler.planning.pooled.problem import PooledPartition, PoolingProblem
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from catenary_services.errors import InvalidInput, PlanInfeasible
from scheduling_cases.tiny_pools import gpu_class, model, partition, pipeline, plan, two_stages

MS = 1_000_000


def gpu_name(agent: AgentId) -> str:
    """Returns the physical GPU of which an agent of `lay_out` is a part."""
    return agent.rpartition(".")[0]


def test_stages_carry_times_and_sizes_as_the_dispatcher_wants_them() -> None:
    agents, laid_out = lay_out(*two_stages(batch=2))
    served = laid_out.models[0]
    assert served.model == ModelKey("m", "1")
    assert served.slo_ns == 40 * MS
    first, second = served.pipelines[0].stages
    assert served.pipelines[0].batch_size == 2
    assert first.partition == PartitionKey(served.model, 0, 2)
    assert first.compute_ns == (4 * MS, 6 * MS)
    assert first.input_bytes == 0
    assert second.partition == PartitionKey(served.model, 2, 4)
    assert second.compute_ns == (2 * MS, 3 * MS)
    assert second.input_bytes == 1_000_000
    of_class = {agent.agent_id: agent.device_class for agent in agents}
    assert [of_class[agent] for agent in first.agents] == ["slow"] * 4
    assert [of_class[agent] for agent in second.agents] == ["fast"] * 2
    assert {agent.link_bytes_per_second for agent in agents} == {10**9}


def test_a_gpu_is_split_into_as_many_agents_as_its_level_says() -> None:
    problem = PoolingProblem(
        (replace(gpu_class("fast", 3, 2), memory_bytes=24_000),),
        (model("m", slo_ms=40, block_ms={"fast": 1.0}),),
    )
    agents, laid_out = lay_out(
        problem, plan({"m": [pipeline(1, 1.0, partition("fast", 4, (0, 4), 8))]})
    )
    assert Counter(gpu_name(agent.agent_id) for agent in agents) == {"fast-0": 4, "fast-1": 4}
    assert {agent.virtual_level for agent in agents} == {4}
    assert {agent.memory_bytes for agent in agents} == {6000}
    assert laid_out.models[0].pipelines[0].stages[0].agents == tuple(a.agent_id for a in agents)


def test_no_server_has_more_gpus_than_fit_and_agents_of_a_gpu_share_it() -> None:
    problem = PoolingProblem(
        (gpu_class("fast", 7, 3),),
        (model("m", slo_ms=40, block_ms={"fast": 1.0}),),
    )
    parts = partition("fast", 2, (0, 2), 6), partition("fast", 1, (2, 4), 4)
    agents, _ = lay_out(problem, plan({"m": [pipeline(1, 500.0, *parts)]}))
    servers: dict[str, set[str]] = defaultdict(set)
    for agent in agents:
        servers[agent.server].add(gpu_name(agent.agent_id))
    assert sorted(len(gpus) for gpus in servers.values()) == [1, 3, 3]
    assert len({(gpu_name(a.agent_id), a.server) for a in agents}) == 7


def shared(level: int, vgpus: int) -> PooledPartition:
    return PooledPartition("fast", level, 0, 4, vgpus, vgpus / level)


def test_remainders_of_a_model_share_gpus_at_the_same_position() -> None:
    problem = PoolingProblem(
        (gpu_class("fast", 3),), (model("m", slo_ms=400, block_ms={"fast": 1.0}),)
    )
    # 1.5 + 0.5 GPUs, and thirds beside quarters: 2/3 + 1/4.
    made = plan(
        {"m": [pipeline(1, 1.0, shared(level, n)) for level, n in ((2, 3), (2, 1), (3, 2), (4, 1))]}
    )
    agents, laid_out = lay_out(problem, made)
    assert [len(each.stages[0].agents) for each in laid_out.models[0].pipelines] == [3, 1, 2, 1]
    filled: dict[str, float] = defaultdict(float)
    for agent in agents:
        filled[gpu_name(agent.agent_id)] += 1 / agent.virtual_level
    assert sorted(filled.values()) == pytest.approx([11 / 12, 1, 1])


def test_remainders_are_packed_exactly_where_first_fit_would_not_do() -> None:
    problem = PoolingProblem(
        (gpu_class("fast", 2),), (model("m", slo_ms=400, block_ms={"fast": 1.0}),)
    )
    # 1/2, 2 x 1/3 and 3 x 1/4 are 23/12: 1/2 + 1/4 + 1/4 and 1/3 + 1/3 + 1/4 or nothing.
    made = plan(
        {"m": [pipeline(1, 1.0, shared(level, n)) for level, n in ((2, 1), (3, 2), (4, 3))]}
    )
    agents, _ = lay_out(problem, made)
    assert len({gpu_name(agent.agent_id) for agent in agents}) == 2


def test_pools_of_other_models_and_positions_share_no_gpu() -> None:
    problem = PoolingProblem(
        (gpu_class("fast", 3),),
        tuple(model(name, slo_ms=400, block_ms={"fast": 1.0}) for name in "mn"),
    )
    half = PooledPartition("fast", 2, 0, 2, 1, 0.5)
    rest = PooledPartition("fast", 2, 2, 4, 1, 0.5)
    agents, _ = lay_out(
        problem, plan({"m": [pipeline(1, 1.0, half, rest)], "n": [pipeline(1, 1.0, shared(2, 1))]})
    )
    assert len({gpu_name(agent.agent_id) for agent in agents}) == 3


def test_a_plan_for_more_gpus_than_there_are_is_refused() -> None:
    problem, made = two_stages()
    small = replace(problem, classes=(gpu_class("fast", 2), gpu_class("slow", 3)))
    with pytest.raises(PlanInfeasible, match="needs 4 GPUs of class slow, the cluster has 3"):
        lay_out(small, made)


def test_a_plan_of_another_task_is_refused() -> None:
    problem, made = two_stages()
    with pytest.raises(InvalidInput, match="no model m"):
        lay_out(replace(problem, models=()), made)
    with pytest.raises(InvalidInput, match="no fast"):
        lay_out(replace(problem, classes=problem.classes[1:]), made)
    unprofiled = plan({"m": [pipeline(8, 1.0, partition("fast", 1, (0, 4), 2))]})
    with pytest.raises(InvalidInput, match="no profile of batch 8 on 1/1 fast"):
        lay_out(problem, unprofiled)
