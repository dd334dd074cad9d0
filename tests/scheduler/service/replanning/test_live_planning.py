"""The pooled planner on a live cluster: real solver processes, scripted agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from catenary_services.domain.profile import DeviceProfile, ModelProfile
from catenary_services.models.model_repository import ModelRepository
from scheduler_harness import (
    MS,
    TOY,
    AgentScript,
    Crowd,
    add_model,
    admin,
    operated,
    scheduler,
    until,
)

Configured = Callable[..., SchedulerSettings]
BLOCKS = 4
OTHER = ModelKey("other", "1")
FAST, SLOW = AgentScript(device_class="l4"), AgentScript(device_class="p4", compute_ns=6 * MS)


def add_profile(
    root: Path,
    key: ModelKey = TOY,
    *,
    guessed: bool = False,
    block_bytes: int = 1,
    **block_ms: float,
) -> None:
    devices = []
    for device_class, per_block in block_ms.items():
        rows = ((int(per_block * MS), int(per_block * 1.5 * MS)),) * BLOCKS
        devices.append(DeviceProfile(device_class, 1, guessed, "a test", (1, 2), rows, rows))
    profile = ModelProfile(
        key, "0" * 64, BLOCKS, (0, 64, 64, 64, 0), (block_bytes,) * BLOCKS, tuple(devices)
    )
    ModelRepository(root / "models").write_profile(key, profile)


@pytest.fixture
def configured(configured: Configured) -> Configured:
    # Scripted agents are silent, and a solver on a busy machine takes a second or two.
    return partial(configured, silence_s=60.0)


async def shown(stub: Any) -> admin_pb2.GetPlanResponse:
    answer: admin_pb2.GetPlanResponse = await stub.GetPlan(admin_pb2.GetPlanRequest())
    return answer


def used(answer: admin_pb2.GetPlanResponse) -> dict[str, set[str]]:
    """Returns the agents of every model."""
    return {
        model["name"]: {a for p in model["pipelines"] for s in p["partitions"] for a in s["agents"]}
        for model in json.loads(answer.plan_json)["models"]
    }


async def test_without_profiles_like_agents_host_whole_models_at_once(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured()) as (process, stub):
        await crowd.serving(process.port)
        answer = await shown(stub)
        assert answer.planner == "pooled"
        assert "made it because agent-0 came" in answer.explanation
        assert "all agents are of one class" in answer.explanation
        assert (
            "Note: times of toy:1 on cpu are estimates: the speed of the machine that prepared the"
            " model" in answer.explanation
        )
        assert "Warning: it does not survive the loss of agent-0." in answer.explanation
        (promise,) = answer.promises
        assert promise.fragile
        await crowd.agent(process.port, "agent-1")

        first_plan = answer.plan_id
        await until(
            lambda: (
                process.leader().cluster.plan_id != first_plan
                and process.leader().cluster.is_settled
            ),
            "two replicas",
        )
        answer = await shown(stub)
        assert "It survives the loss of any one agent" in answer.explanation
        assert "survives the loss of any one agent" in answer.promises[0].survives


async def test_with_profiles_the_plan_is_pooled_and_says_what_it_promises(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_profile(tmp_path, guessed=True, l4=1.0, p4=3.0)
    async with operated(configured(expected_agents=3)) as (process, stub):
        gateway = await crowd.gateway(process.port)
        for name, script in (("l4-0", FAST), ("p4-0", SLOW), ("p4-1", SLOW)):
            await crowd.agent(process.port, name, script)
        await until(lambda: gateway.ready, "ready")
        answer = await shown(stub)
        assert answer.planner == "pooled"
        assert used(answer) == {"toy": {"l4-0", "p4-0", "p4-1"}}
        for said in (
            "The pooled planner made it because l4-0, p4-0, p4-1 came and toy:1 was deployed",
            "requests/s",
            "Note: times of toy:1 on p4 are estimates: a test.",
            "Note: an even split would take",
        ):
            assert said in answer.explanation
        await gateway.submit(1)
        await gateway.dispatched(1)


async def test_a_class_nobody_profiled_is_planned_with_by_an_estimate(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_profile(tmp_path, l4=1.0)
    async with operated(configured(expected_agents=2)) as (process, stub):
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "l4-0", FAST)
        await crowd.agent(process.port, "p4-0", SLOW)
        await until(lambda: gateway.ready, "ready")
        answer = await shown(stub)
        assert (answer.planner, used(answer)) == ("pooled", {"toy": {"l4-0", "p4-0"}})
        assert "times of toy:1 on l4 are those of its profile: a test" in answer.explanation
        assert "times of toy:1 on p4 are estimates" in answer.explanation


async def test_measurements_correct_times_that_are_wrong(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    # By its profile one row takes 3.6 s on a P4, and the SLO is 2 s; in truth it is as fast as any.
    add_profile(tmp_path, guessed=True, l4=1.0, p4=900.0)
    quick = configured(expected_agents=2, replan_lasting_s=0.0, replan_interval_s=0.0)
    async with operated(quick) as (process, stub):
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "l4-0", FAST)
        await crowd.agent(process.port, "p4-0", AgentScript(device_class="p4"))
        await until(lambda: gateway.ready, "ready")
        known = "corrected by what 1 of its agents measured at load"
        while known not in (answer := await shown(stub)).explanation:
            await asyncio.sleep(0.1)
        assert used(answer) == {"toy": {"l4-0", "p4-0"}}
        assert "is idle" not in answer.explanation
        assert "survives the loss of any one agent" in answer.promises[0].survives


async def test_an_slo_no_pooled_plan_can_keep_falls_back_with_the_reason(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_profile(tmp_path, l4=900.0, p4=900.0)  # 3.6 s for one row; the SLO is 2 s
    async with operated(configured(expected_agents=2)) as (process, stub):
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "l4-0", FAST)
        await crowd.agent(process.port, "p4-0", AgentScript(device_class="p4"))
        await until(lambda: gateway.ready, "ready")
        answer = await shown(stub)
        assert answer.planner == "even"
        assert "The pooled planner was not used: " in answer.explanation
        assert "toy:1" in answer.explanation.split("not used: ")[1].splitlines()[0]


async def test_a_profile_of_another_cut_is_named_and_not_used(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_profile(tmp_path, l4=1.0)
    add_model(tmp_path / "models", blocks=6)
    async with operated(configured()) as (process, stub):
        await crowd.serving(process.port, FAST, named="l4")
        assert "profile the model again" in (await shown(stub)).explanation


async def test_planning_anew_by_hand_replaces_a_plan_applied_by_hand(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_profile(tmp_path, l4=1.0)
    async with operated(configured(expected_agents=2)) as (process, stub):
        await crowd.serving(process.port, *[FAST] * 2, named="l4")
        same = await stub.Replan(admin_pb2.ReplanRequest(), timeout=20)
        assert (same.changed, same.HasField("plan_switch")) == (False, False)
        by_hand = {
            "models": [
                {
                    "name": "toy",
                    "pipelines": [
                        {"batch": 1, "partitions": [{"blocks": [0, 4], "agents": ["l4-1"]}]}
                    ],
                }
            ]
        }
        await stub.ApplyPlan(admin_pb2.ApplyPlanRequest(plan_json=json.dumps(by_hand)), timeout=10)
        assert (await shown(stub)).planner == "hand"
        again = await stub.Replan(admin_pb2.ReplanRequest(), timeout=20)
        assert (again.changed, again.plan_switch.phase) == (True, "done")
        answer = await shown(stub)
        assert (answer.planner, used(answer)) == ("pooled", {"toy": {"l4-0", "l4-1"}})


async def test_a_shift_of_the_load_moves_agents_from_one_model_to_the_other(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_model(tmp_path / "models", OTHER)
    for key in (TOY, OTHER):
        add_profile(tmp_path, key, l4=1.0, block_bytes=160_000_000)  # an agent has room for one
    quick = configured(
        models=["toy", "other"],
        planner="pooled",  # by default each keeps the two agents of which it may lose one
        expected_agents=4,
        load_window_s=1.0,
        replan_lasting_s=0.1,
        replan_interval_s=0.1,
    )
    async with operated(quick) as (process, stub):
        gateway, _ = await crowd.serving(process.port, *[FAST] * 4, named="l4")
        await until(lambda: (m := gateway.model("other")) and m.ready, "the other is ready")
        before = used(await shown(stub))
        assert {len(agents) for agents in before.values()} == {2}
        for number in range(1, 11):
            await gateway.submit(number, rows=30)
        await until(lambda: process.leader().cluster.last_switch, "the plan changes", 20)
        await until(lambda: process.leader().cluster.is_settled, "and is in force")
        answer = await shown(stub)
        after = used(answer)
        assert len(after["toy"]) == 3
        assert answer.last_switch.phase == "done"
        assert "of the load moved between models: other:1 5%, toy:1 95%" in answer.explanation
        assert not answer.last_switch.downtime


async def test_a_new_agent_is_planned_with_and_a_lost_one_without(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_profile(tmp_path, l4=1.0)
    async with operated(configured()) as (process, stub):
        await crowd.serving(process.port, FAST, named="l4")
        second = await crowd.agent(process.port, "l4-1", FAST)
        cluster = process.leader().cluster
        await until(lambda: cluster.last_switch, "it is planned with")
        answer = await shown(stub)
        assert used(answer) == {"toy": {"l4-0", "l4-1"}}
        assert answer.last_switch.cause == "l4-1 came"
        await second.close()
        await until(lambda: "l4-1 left" in (cluster.last_switch.cause), "planned without")
        assert used(await shown(stub)) == {"toy": {"l4-0"}}


async def test_a_pool_goes_on_without_who_cannot_load_and_takes_it_in_when_it_can(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_profile(tmp_path, l4=1.0)
    async with operated(configured()) as (process, stub):
        await crowd.serving(process.port, FAST, named="l4")
        broken = AgentScript(device_class="l4", fail_loads=1)
        await crowd.agent(process.port, "l4-1", broken)
        leader = process.leader()
        await until(lambda: leader.cluster.last_switch, "the switch")
        assert leader.cluster.last_switch.phase == "done"
        assert used(await shown(stub)) == {"toy": {"l4-0", "l4-1"}}
        partition = PartitionKey(ModelKey("toy", "1"), 0, 4)
        await until(
            lambda: leader.availability.can_serve(AgentId("l4-1"), partition), "the second try"
        )
        assert not leader.availability.failure(AgentId("l4-1"), partition)


async def test_a_new_leader_remembers_who_planned_and_what_happened_last(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_profile(tmp_path, l4=1.0)
    async with operated(configured()) as (old, stub):
        gateway = await crowd.gateway(old.port)
        agents = [await crowd.agent(old.port, "l4-0", FAST)]
        await until(lambda: gateway.ready, "ready")
        agents.append(await crowd.agent(old.port, "l4-1", FAST))
        await until(lambda: old.leader().cluster.last_switch, "planned with two")
        before = await shown(stub)
        await until(lambda: len(old.leader()._journal) == 0, "written")
        await old.leader().write_behind.flush()
        loaded = [list(agent.loaded.values()) for agent in agents]
    async with operated(configured(scheduler_id="scheduler-1")) as (new, stub):
        await until(lambda: new.leads, "it leads")
        gateway = await crowd.gateway(new.port)
        for number, partitions in enumerate(loaded):
            script = AgentScript(device_class="l4", partitions=partitions, epoch=1)
            await crowd.agent(new.port, f"l4-{number}", script)
        await until(lambda: gateway.ready, "ready")
        assert await shown(stub) == before


async def test_the_plan_is_refused_where_the_leader_is_not(configured: Configured) -> None:
    async with (
        scheduler(configured()),
        scheduler(configured(scheduler_id="standby")) as standby,
        admin(standby.port) as stub,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Replan(admin_pb2.ReplanRequest(), timeout=5)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
