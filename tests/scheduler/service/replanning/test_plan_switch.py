"""From one plan to the next, with scripted agents over real gRPC."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import ModelKey
from scheduler_harness import (
    MS,
    TOY,
    AgentScript,
    Crowd,
    FakeAgent,
    FakeGateway,
    add_model,
    crash,
    operated,
    scheduler,
    until,
)

Configured = Callable[..., SchedulerSettings]
CROWDED = 9
"""Bytes of an agent that holds four blocks of 2 bytes, and not two more."""


def plan(*stages: tuple[int, int, list[str]], name: str = "toy") -> dict[str, Any]:
    partitions = [{"blocks": [first, last], "agents": agents} for first, last, agents in stages]
    return {"models": [{"name": name, "pipelines": [{"batch": 2, "partitions": partitions}]}]}


WHOLE_ON_0 = plan((0, 4, ["agent-0"]))
SPLIT = plan((0, 2, ["agent-0"]), (2, 4, ["agent-1"]))


def request(document: dict[str, Any]) -> admin_pb2.ApplyPlanRequest:
    return admin_pb2.ApplyPlanRequest(plan_json=json.dumps(document))


def phase(process: SchedulerProcess) -> str:
    report = process.leader().cluster.rollout_report()
    return "" if report is None else report.phase


async def flushing(
    process: SchedulerProcess, stub: Any, crowd: Crowd
) -> tuple[FakeGateway, list[FakeAgent], scheduler_pb2.DispatchBatch, asyncio.Future[Any]]:
    """Begins a switch of a crowded agent, which waits for a batch."""
    small = AgentScript(memory_bytes=CROWDED)
    gateway, agents = await crowd.serving(process.port, small, AgentScript())
    await gateway.submit(1)
    batch = await gateway.dispatched(1)
    switching = asyncio.ensure_future(stub.ApplyPlan(request(SPLIT), timeout=10))
    await until(lambda: phase(process) == "flushing", "it waits")
    return gateway, agents, batch, switching


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    return error.value.details() or ""


def blocks(batch: scheduler_pb2.DispatchBatch) -> list[tuple[str, int, int]]:
    return [(hop.agent_id, hop.first_block, hop.last_block) for hop in batch.route]


async def test_where_both_plans_fit_nothing_is_paused_and_old_batches_finish(
    configured: Configured, crowd: Crowd
) -> None:
    # A batch that a busy machine reports late must not count as lost.
    patient = configured(plan=WHOLE_ON_0, overdue_grace_ms=10_000.0)
    async with operated(patient) as (process, stub):
        gateway, agents = await crowd.serving(process.port, AgentScript(), AgentScript())
        await gateway.submit(1)
        old = await gateway.dispatched(1)
        answer = await stub.ApplyPlan(request(SPLIT), timeout=10)
        assert (answer.plan_id, answer.plan_switch.phase) == ("plan-1-2", "done")
        assert (answer.plan_switch.from_plan, answer.plan_switch.to_plan) == (
            "plan-1-1",
            "plan-1-2",
        )
        assert not answer.plan_switch.downtime
        await gateway.submit(2)
        assert blocks(await gateway.dispatched(2)) == [("agent-0", 0, 2), ("agent-1", 2, 4)]
        # The old partition stays for the batch that is still on its way to it.
        assert (0, 4) in agents[0].loaded
        await agents[0].report(old.batch_id, 0)
        await until(lambda: (0, 4) not in agents[0].loaded, "it goes when it is not needed")
        assert len(gateway.dispatches(1)) == 1
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert (shown.planner, shown.last_switch.phase) == ("hand", "done")
        assert "no model was paused" in shown.explanation


async def test_an_agent_that_cannot_hold_both_is_flushed_emptied_and_filled(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(plan=WHOLE_ON_0)) as (process, stub):
        small = AgentScript(memory_bytes=CROWDED, compute_ns=1500 * MS)
        gateway, agents = await crowd.serving(process.port, small, AgentScript())
        await gateway.submit(1, budget_ns=20_000 * MS)
        old = await gateway.dispatched(1)
        switching = asyncio.ensure_future(stub.ApplyPlan(request(SPLIT), timeout=30))
        await until(lambda: (2, 4) in agents[1].loaded, "who has room loads at once")
        await until(lambda: phase(process) == "flushing", "the old batches are waited for")
        await gateway.submit(2, budget_ns=20_000 * MS)
        await gateway.submit(3, budget_ns=500 * MS)
        refusal = await gateway.rejected(3)
        assert refusal.failure.reason == "UNAVAILABLE"
        assert (0, 4) in agents[0].loaded
        assert not gateway.dispatches(2)
        assert gateway.ready  # requests wait, they are not turned away
        await agents[0].report(old.batch_id, 0)
        answer = await switching
        assert answer.plan_switch.phase == "done"
        assert blocks(await gateway.dispatched(2)) == [("agent-0", 0, 2), ("agent-1", 2, 4)]
        assert list(agents[0].loaded) == [(0, 2)]
        (pause,) = answer.plan_switch.downtime
        assert (pause.model, pause.version) == ("toy", "1")
        assert 500 * MS <= pause.downtime_ns <= answer.plan_switch.duration_ns
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        said_s = float(shown.explanation.split("toy:1 was not dispatched for ")[1].split()[0])
        assert said_s == pytest.approx(pause.downtime_ns / 1e9, abs=0.1)


async def test_what_else_a_pool_has_serves_while_one_agent_is_refilled(
    configured: Configured, crowd: Crowd
) -> None:
    both = plan((0, 4, ["agent-0", "agent-1"]))
    new = plan((0, 2, ["agent-0"]), (2, 4, ["agent-1"]))
    async with operated(configured(plan=both)) as (process, stub):
        small = AgentScript(memory_bytes=CROWDED, compute_ns=50 * MS)
        large = AgentScript(compute_ns=50 * MS)
        gateway, agents = await crowd.serving(process.port, small, large)
        agents[0].script.hold_loads = True
        switching = asyncio.ensure_future(stub.ApplyPlan(request(new), timeout=10))
        await until(lambda: (0, 4) not in agents[0].loaded, "agent-0 gave its blocks up")
        for number in range(1, 4):
            await gateway.submit(number)
            assert blocks(await gateway.dispatched(number)) == [("agent-1", 0, 4)]
        agents[0].script.hold_loads = False
        await agents[0]._load(agents[0].all("load_partition")[-1])
        answer = await switching
        assert (answer.plan_switch.phase, list(answer.plan_switch.downtime)) == ("done", [])


async def test_an_agent_that_cannot_load_brings_the_old_plan_back(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(plan=WHOLE_ON_0, load_attempts=2)) as (process, stub):
        broken = AgentScript(fail_loads=1000)
        gateway, agents = await crowd.serving(process.port, AgentScript(), broken)
        reason = await refused(stub.ApplyPlan(request(SPLIT), timeout=10))
        assert reason == ("plan-1-1 stays in force: agent-1 cannot load toy:1[2,4): out of memory")
        await gateway.submit(1)
        assert blocks(await gateway.dispatched(1)) == [("agent-0", 0, 4)]
        await until(lambda: list(agents[0].loaded) == [(0, 4)], "what was preloaded goes")
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert (shown.plan_id, shown.last_switch.phase) == ("plan-1-1", "rolled back")
        assert shown.last_switch.problem in reason
        assert "went back to plan-1-1" in shown.explanation
        assert not shown.last_switch.downtime
        tried = len(agents[1].all("load_partition"))
        process.leader().cluster.reconcile(1e12)
        assert len(agents[1].all("load_partition")) == tried  # it is not asked any more


async def test_a_crowded_agent_that_cannot_load_gets_its_old_partitions_again(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(plan=WHOLE_ON_0, load_attempts=1)) as (process, stub):
        gateway, agents, old, switching = await flushing(process, stub, crowd)
        await gateway.submit(2)
        agents[0].script.fail_loads = 1
        await agents[0].report(old.batch_id, 0)
        assert "agent-0 cannot load toy:1[0,2)" in await refused(switching)
        assert blocks(await gateway.dispatched(2)) == [("agent-0", 0, 4)]
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert shown.last_switch.phase == "rolled back"
        assert shown.last_switch.downtime[0].downtime_ns > 0
        assert await settles(process.leader())


async def settles(leader: Any) -> bool:
    return bool(await until(lambda: leader.cluster.is_settled, "the old plan is all there is"))


async def test_an_agent_that_cannot_even_load_what_it_had_is_left_alone_until_it_can(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(plan=WHOLE_ON_0, load_attempts=1)) as (process, stub):
        gateway, agents, old, switching = await flushing(process, stub, crowd)
        agents[0].script.fail_loads = 2  # the new partition and the old one
        await agents[0].report(old.batch_id, 0)
        assert "agent-0 cannot load toy:1[0,2)" in await refused(switching)
        await until(lambda: not gateway.ready, "nobody is dispatched to an empty agent")
        await gateway.submit(2)
        assert blocks(await gateway.dispatched(2)) == [("agent-0", 0, 4)]
        assert list(agents[0].loaded) == [(0, 4)]


@pytest.mark.parametrize("victim", ["agent-1", "agent-0"])
async def test_an_agent_lost_on_the_way_brings_the_old_plan_back(
    configured: Configured, crowd: Crowd, victim: str
) -> None:
    old = plan((0, 4, ["agent-0", "agent-2"]))
    async with operated(configured(plan=old)) as (process, stub):
        slow = AgentScript()
        gateway, agents = await crowd.serving(process.port, AgentScript(), slow, AgentScript())
        slow.hold_loads = True
        switching = asyncio.ensure_future(stub.ApplyPlan(request(SPLIT), timeout=10))
        await until(lambda: (0, 2) in agents[0].loaded, "one has loaded")
        await agents[int(victim[-1])].close()
        assert await refused(switching) == f"plan-1-1 stays in force: {victim} was lost"
        await gateway.submit(1)
        assert blocks(await gateway.dispatched(1))[0][1:] == (0, 4)


async def test_a_plan_that_does_not_come_about_in_time_is_given_up(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(plan=WHOLE_ON_0, switch_timeout_s=0.4)) as (process, stub):
        gateway, _ = await crowd.serving(process.port, AgentScript())
        reason = await refused(stub.ApplyPlan(request(SPLIT), timeout=10))
        assert "not ready within 0 s, waiting for toy:1[2,4) on agent-1" in reason
        assert gateway.ready


async def test_loading_that_gets_on_begins_the_time_of_a_change_anew(
    configured: Configured, crowd: Crowd
) -> None:
    """An engine may take longer to start than `switch_timeout_s`, and says how it gets on."""
    async with operated(configured(plan=WHOLE_ON_0)) as (process, stub):
        slow = AgentScript()
        _, agents = await crowd.serving(process.port, AgentScript(), slow)
        slow.hold_loads = True
        switching = asyncio.ensure_future(stub.ApplyPlan(request(SPLIT), timeout=60))
        await until(lambda: agents[1].all("load_partition"), "it is ordered")
        rollout = process.leader().cluster._rollouts.rollout
        kind, key = scheduler_pb2.STEP_KIND_LOADING, agents[1].all("load_partition")[-1].key
        before_ns = time.monotonic_ns()
        beat = scheduler_pb2.Heartbeat(steps=[scheduler_pb2.StepInHand(kind=kind, partition=key)])
        await agents[1].send(scheduler_pb2.AgentMessage(heartbeat=beat))
        await until(lambda: rollout.progressed_ns >= before_ns, "it is heard")
        switching.cancel()


async def test_a_plan_too_slow_for_its_deadline_does_not_replace_one_that_is_not(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(plan=WHOLE_ON_0)) as (process, stub):
        slow = AgentScript(compute_ns=5_000 * MS)
        gateway, _ = await crowd.serving(process.port, AgentScript(), slow)
        assert "SLO" in await refused(stub.ApplyPlan(request(SPLIT), timeout=10))
        assert gateway.ready


async def test_another_plan_on_the_way_takes_the_place_of_the_first(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(plan=WHOLE_ON_0)) as (process, stub):
        slow = AgentScript()
        gateway, agents = await crowd.serving(process.port, AgentScript(), slow)
        slow.hold_loads = True
        first = asyncio.ensure_future(stub.ApplyPlan(request(SPLIT), timeout=10))
        await until(lambda: (0, 2) in agents[0].loaded, "the first is under way")
        other = plan((0, 1, ["agent-0"]), (1, 4, ["agent-0"]))
        answer = await stub.ApplyPlan(request(other), timeout=10)
        assert answer.plan_switch.phase == "done"
        with pytest.raises(grpc.aio.AioRpcError):
            await first
        await gateway.submit(1)
        assert blocks(await gateway.dispatched(1)) == [("agent-0", 0, 1), ("agent-0", 1, 4)]


async def test_a_second_model_goes_on_while_the_first_is_paused(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_model(tmp_path / "models", ModelKey("other", "1"))
    bystander = plan((0, 4, ["agent-1"]), name="other")["models"]
    old = {"models": WHOLE_ON_0["models"] + bystander}
    new = {"models": SPLIT["models"] + bystander}
    async with operated(configured(plan=old)) as (process, stub):
        small = AgentScript(memory_bytes=CROWDED)
        gateway, agents = await crowd.serving(process.port, small, AgentScript())
        await until(lambda: (m := gateway.model("other")) and m.ready, "the other is ready")
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        switching = asyncio.ensure_future(stub.ApplyPlan(request(new), timeout=10))
        await until(lambda: phase(process) == "flushing", "it waits")
        await gateway.submit(2, model="other")
        assert blocks(await gateway.dispatched(2)) == [("agent-1", 0, 4)]
        await agents[0].report(batch.batch_id, 0)
        answer = await switching
        assert [pause.model for pause in answer.plan_switch.downtime] == ["toy"]


async def test_a_new_leader_serves_by_the_old_plan_and_begins_the_switch_again(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured()) as (old, stub):
        held = AgentScript()
        gateway, agents = await crowd.serving(old.port, AgentScript())
        agents.append(await crowd.agent(old.port, "agent-9", held))
        cut = plan((0, 2, ["agent-0"]), (2, 4, ["agent-9"]))
        await stub.ApplyPlan(request(cut), timeout=30)
        await until(lambda: list(agents[0].loaded) == [(0, 2)], "split over both")
        held.hold_loads = True
        moved = plan((0, 1, ["agent-0"]), (1, 4, ["agent-9"]))
        applying = asyncio.ensure_future(stub.ApplyPlan(request(moved), timeout=30))
        await until(lambda: (0, 1) in agents[0].loaded, "under way")
        await old.leader().write_behind.flush()
        await asyncio.sleep(0.1)
        in_force = old.leader().cluster.plan_id
        await crash(old)
        with pytest.raises(grpc.aio.AioRpcError):
            await applying
    loads = [list(agent.loaded.values()) for agent in agents]
    async with scheduler(configured(scheduler_id="scheduler-1")) as new:
        await until(lambda: new.leads, "it leads")
        gateway = await crowd.gateway(new.port)
        back = AgentScript(partitions=loads[0], epoch=1)
        again = AgentScript(partitions=loads[1], epoch=1, hold_loads=True)
        await crowd.agent(new.port, "agent-0", back)
        second = await crowd.agent(new.port, "agent-9", again)
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        assert blocks(batch) == [("agent-0", 0, 2), ("agent-9", 2, 4)]
        assert batch.plan_id == in_force
        await until(lambda: second.all("load_partition"), "the switch begins again")
        again.hold_loads = False
        await second._load(second.all("load_partition")[-1])
        await until(lambda: new.leader().cluster.is_settled, "and ends")
        await gateway.submit(2)
        assert blocks(await gateway.dispatched(2)) == [("agent-0", 0, 1), ("agent-9", 1, 4)]


async def test_a_new_leader_finds_agents_half_emptied(configured: Configured, crowd: Crowd) -> None:
    """The old leader died in the pause: the old plan is nowhere whole, the new one neither."""
    async with operated(configured(plan=WHOLE_ON_0)) as (old, stub):
        small = AgentScript(memory_bytes=CROWDED)
        _, agents = await crowd.serving(old.port, small, AgentScript())
        small.hold_loads = True
        applying = asyncio.ensure_future(stub.ApplyPlan(request(SPLIT), timeout=30))
        await until(lambda: not agents[0].loaded, "agent-0 is emptied")
        await old.leader().write_behind.flush()
        await asyncio.sleep(0.1)
        await crash(old)
        with pytest.raises(grpc.aio.AioRpcError):
            await applying
        kept = list(agents[1].loaded.values())
    async with scheduler(configured(plan=WHOLE_ON_0, scheduler_id="scheduler-1")) as new:
        await until(lambda: new.leads, "it leads")
        gateway = await crowd.gateway(new.port)
        await crowd.agent(new.port, "agent-0", AgentScript(memory_bytes=CROWDED, epoch=1))
        await crowd.agent(new.port, "agent-1", AgentScript(partitions=kept, epoch=1))
        await gateway.submit(1, budget_ns=9_000 * MS)
        await gateway.dispatched(1)
        await until(lambda: new.leader().cluster.is_settled, "the switch ends")
        await gateway.submit(2)
        assert blocks(await gateway.dispatched(2)) == [("agent-0", 0, 2), ("agent-1", 2, 4)]


async def test_what_plan_show_prints_can_be_applied(configured: Configured, crowd: Crowd) -> None:
    async with operated(configured(plan=WHOLE_ON_0)) as (process, stub):
        await crowd.serving(process.port, AgentScript())
        shown = json.loads((await stub.GetPlan(admin_pb2.GetPlanRequest())).plan_json)
        answer = await stub.ApplyPlan(request({**shown, "last_switch": {"phase": "done"}}))
        assert answer.plan_id == "plan-1-1"
        assert not answer.HasField("plan_switch")
        assert process.leader().cluster.is_ready(TOY)
