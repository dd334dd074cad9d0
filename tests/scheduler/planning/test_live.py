from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from catenary_scheduler.planning import DeployedModel
from catenary_scheduler.planning.live import (
    LiveCluster,
    LiveModel,
    PlanningRules,
    completed,
    device_groups,
    origins,
    place,
    pooling_problem,
    with_batch_building,
)
from catenary_scheduler.planning.pooled.problem import (
    PooledModelPlan,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.model import BlockTable, Boundary
from catenary_services.domain.plan import Agent
from catenary_services.domain.profile import DeviceProfile, ModelProfile
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import PlanInfeasible

TOY, OTHER = ModelKey("toy", "1"), ModelKey("other", "2")
MS = 1_000_000
BLOCKS = 4


def agent(name: str, device_class: str = "l4", level: int = 1, **changes: object) -> Agent:
    usual = Agent(AgentId(name), device_class, ServerId(f"server-of-{name}"), 10**9, 10**9, level)
    return replace(usual, **changes)  # type: ignore[arg-type]


def deployed(key: ModelKey = TOY, max_batch: int = 4) -> DeployedModel:
    spec = TensorSpec("x", "FP32", (ANY, 25))
    table = BlockTable("0" * 64, True, (Boundary((spec,), 100),) * (BLOCKS + 1), (MS,) * BLOCKS)
    return DeployedModel(key, table, 100 * MS, max_batch, True)


def times(device_class: str, level: int, ns: int, *, guessed: bool = False) -> DeviceProfile:
    rows = ((ns, 2 * ns),) * BLOCKS
    return DeviceProfile(device_class, level, guessed, "a test", (1, 2), rows, rows)


def profile(*devices: DeviceProfile, key: ModelKey = TOY) -> ModelProfile:
    cuts = (0, *(50,) * (BLOCKS - 1), 0)
    return ModelProfile(key, "0" * 64, BLOCKS, cuts, (7,) * BLOCKS, devices)


def cluster(*agents: Agent, devices: tuple[DeviceProfile, ...] = ()) -> LiveCluster:
    return LiveCluster(agents, (LiveModel(deployed(), profile(*devices), 1.0),), {})


RULES = PlanningRules(margin=0.4, max_partitions=2)


def test_agents_of_another_level_are_another_class() -> None:
    groups = device_groups([agent("c", "p4"), agent("b", level=2), agent("a", level=2), agent("d")])
    assert [(g.name, [a.agent_id for a in g.agents]) for g in groups] == [
        ("l4", ["d"]),
        ("l4 1/2", ["a", "b"]),
        ("p4", ["c"]),
    ]


def test_a_cluster_becomes_a_problem() -> None:
    shared = ServerId("rack")
    found = pooling_problem(
        cluster(
            agent("a", server=shared, link_bytes_per_second=10),
            agent("b", server=shared, memory_bytes=5),
            agent("c", "p4", level=2, server=shared),
            devices=(times("l4", 1, MS), times("p4", 2, 3 * MS)),
        ),
        RULES,
    )
    l4, p4 = found.classes
    assert (l4.name, l4.count, l4.gpus_per_server, l4.server_bits_per_second) == ("l4", 2, 3, 80.0)
    assert (l4.memory_bytes, p4.name, p4.count, p4.levels) == (5, "p4 1/2", 1, (1,))
    (model,) = found.models
    assert (model.name, model.slo_us, model.margin_us) == ("toy:1", 100_000.0, 40_000.0)
    assert model.cut_bytes == (0, 50, 50, 50, 0)  # float32 travels as float16
    assert model.block_weight_bytes == (8,) * BLOCKS  # with a fifth more to run in
    np.testing.assert_allclose(model.latency_us["l4", 1], [[1_000, 2_000]] * BLOCKS)
    np.testing.assert_allclose(model.latency_us["p4 1/2", 1], [[3_000, 6_000]] * BLOCKS)
    assert found.max_partitions == 2


def test_memory_is_left_out_where_an_agent_does_not_know_its_own() -> None:
    found = pooling_problem(
        cluster(agent("a", memory_bytes=0), agent("b"), devices=(times("l4", 1, MS),)), RULES
    )
    assert found.classes[0].memory_bytes is None


def test_what_agents_measured_corrects_the_blocks_they_measured() -> None:
    base = cluster(agent("a"), agent("b"), devices=(times("l4", 1, MS),))
    measured = {
        (AgentId("a"), PartitionKey(TOY, 0, 2)): (4 * MS, 4 * MS),  # 2 and 1 times the profile
        (AgentId("b"), PartitionKey(TOY, 1, 4)): (3 * MS,),  # as the profile says
        (AgentId("b"), PartitionKey(OTHER, 0, 4)): (9 * MS,),
        (AgentId("x"), PartitionKey(TOY, 0, 4)): (9 * MS,),
    }
    found = pooling_problem(replace(base, measured=measured), RULES).models[0]
    np.testing.assert_allclose(
        found.latency_us["l4", 1],
        [[2_000, 2_000], [1_500, 2_000], [1_000, 2_000], [1_000, 2_000]],
    )


def test_one_measurement_corrects_all_of_an_estimate() -> None:
    base = cluster(agent("a"), devices=(times("l4", 1, MS, guessed=True),))
    measured = {(AgentId("a"), PartitionKey(TOY, 0, 2)): (4 * MS, 8 * MS)}
    found = pooling_problem(replace(base, measured=measured), RULES).models[0]
    np.testing.assert_allclose(found.latency_us["l4", 1], [[2_000, 4_000]] * BLOCKS)


def test_a_virtual_gpu_measured_alone_does_not_look_faster_than_among_busy_siblings() -> None:
    base = cluster(agent("a", level=2), devices=(times("l4", 2, MS),))
    measured = {(AgentId("a"), PartitionKey(TOY, 0, 4)): (2 * MS, 16 * MS)}
    found = pooling_problem(replace(base, measured=measured), RULES).models[0]
    np.testing.assert_allclose(found.latency_us["l4 1/2", 1], [[1_000, 4_000]] * BLOCKS)


def test_where_times_come_from_is_said() -> None:
    groups = device_groups([agent("a"), agent("b", "p4", level=2)])
    half = completed(deployed(), profile(times("l4", 1, MS)), groups)
    assert origins([(deployed(), half)], groups, {}, ()) == [
        "times of toy:1 on l4 are those of its profile: a test",
        "times of toy:1 on p4 1/2 are estimates: the speed of the machine that prepared the model",
    ]


def test_a_class_without_times_gets_estimates_and_a_task_without_agents_is_refused() -> None:
    both = cluster(agent("a"), agent("b", "p4"), devices=(times("l4", 1, MS),))
    assert list(pooling_problem(both, RULES).models[0].latency_us) == [("l4", 1), ("p4", 1)]
    for wrong, said in (
        (replace(both, agents=()), "no agent"),
        (replace(both, models=()), "no model"),
    ):
        with pytest.raises(PlanInfeasible, match=said):
            pooling_problem(wrong, RULES)


def solution(
    problem: PoolingProblem, *pipelines: tuple[int, list[tuple[str, int, int, int]]]
) -> tuple[PoolingProblem, PooledPlan]:
    planned = tuple(
        PooledPipeline(
            batch,
            100.0,
            10_000.0,
            tuple(PooledPartition(gpu, 1, first, last, n, n) for gpu, first, last, n in parts),
        )
        for batch, parts in pipelines
    )
    model = PooledModelPlan("toy:1", 100.0, planned)
    return problem, PooledPlan(100.0, 100.0, True, "test", 0.0, (model,))


MIXED = cluster(
    *(agent(f"a{i}", server=ServerId(f"s{i % 2}")) for i in range(4)),
    *(agent(f"p{i}", "p4") for i in range(3)),
    agent("t0", "t4"),
    devices=(times("l4", 1, MS), times("p4", 1, 3 * MS), times("t4", 1, 2 * MS)),
)
PROBLEM = pooling_problem(MIXED, RULES)


def pools(hosted: dict[AgentId, list[PartitionKey]], *pipelines: object) -> list[list[str]]:
    found, idle = place(
        solution(PROBLEM, *pipelines),
        [deployed()],
        MIXED.groups,
        hosted,  # type: ignore[arg-type]
    )
    stages = [s for pipeline in found.models[0].pipelines for s in pipeline.stages]
    return [list(stage.agents) for stage in stages] + [list(idle)]


def test_pools_spread_over_servers_and_left_over_agents_join_the_busiest() -> None:
    got = pools({}, (2, [("l4", 0, 3, 2), ("p4", 3, 4, 1)]), (1, [("l4", 0, 4, 1)]))
    # a0 and a2 share a server: the first pool takes one agent of each.
    # The whole model on one agent is busier than three blocks of it on two.
    assert got == [["a0", "a1"], ["p0", "p1", "p2"], ["a2", "a3"], ["t0"]]


def test_agents_keep_what_they_host() -> None:
    hosted = {AgentId("a3"): [PartitionKey(TOY, 0, 3)], AgentId("a0"): [PartitionKey(TOY, 0, 4)]}
    got = pools(hosted, (2, [("l4", 0, 3, 2), ("p4", 3, 4, 3)]), (1, [("l4", 0, 4, 1)]))
    assert got[0] == ["a1", "a3"]
    assert got[2][0] == "a0"


def test_pipelines_of_one_shape_become_one_with_larger_pools() -> None:
    part = ("l4", 0, 4, 1)
    got = pools({}, (2, [part]), (2, [part]), (1, [part]))
    assert [len(pool) for pool in got] == [3, 1, 4]  # the last: idle ones


def test_a_plan_of_more_agents_than_there_are_is_refused() -> None:
    with pytest.raises(PlanInfeasible, match="needs 5 agents of l4, 4 are there"):
        pools({}, (1, [("l4", 0, 4, 5)]))
    problem, plan = solution(PROBLEM)
    with pytest.raises(PlanInfeasible, match="no pipeline for toy:1"):
        place((problem, plan), [deployed()], MIXED.groups, {})


def test_batches_take_their_time_to_fill() -> None:
    problem, plan = solution(PROBLEM, (1, [("l4", 0, 4, 1)]))
    assert with_batch_building(problem, plan).models[0].batch_build_us_per_row == 13_000.0
    idle = replace(plan, models=(PooledModelPlan("toy:1", 0.0, ()),))
    assert with_batch_building(problem, idle).models[0].batch_build_us_per_row == 0.0
