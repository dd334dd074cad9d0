"""Audits over real streams: what agents and gateways say is missing or too much is put right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from catenary_protos.catenary.v1 import admin_pb2, common_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.keys import RedisKeys
from catenary_services.redis.embedded_redis import EmbeddedRedis
from chain_harness import RING, nothing_is_left, serving
from scheduler_harness import AgentScript, Crowd, FakeAgent, FakeGateway, admin, scheduler, until

Configured = Callable[..., SchedulerSettings]
Ring = tuple[SchedulerProcess, FakeGateway, list[FakeAgent]]
OFTEN = {"audit_interval_s": 0.1, "audit_grace_s": 0.05}


@asynccontextmanager
async def ring(
    generating: Configured, crowd: Crowd, tmp_path: Path, *scripts: AgentScript
) -> AsyncIterator[Ring]:
    """A ring of two agents that generates, audited often."""
    async with scheduler(generating(plan=RING, **OFTEN)) as process:
        gateway, agents = await serving(
            process, crowd, *(scripts or (AgentScript(), AgentScript()))
        )
        yield process, gateway, agents


async def leaks(process: SchedulerProcess) -> dict[str, float]:
    """Returns how many leaks were found and mended, by kind, once every one of them is mended."""

    def counted(metric: Any) -> dict[str, float]:
        samples = [sample for family in metric.collect() for sample in family.samples]
        return {each.labels["kind"]: each.value for each in samples if each.name.endswith("_total")}

    metrics = process.leader().audits._metrics
    await until(
        lambda: counted(metrics.book_leaks) == counted(metrics.book_leaks_mended) != {}, "mended"
    )
    return counted(metrics.book_leaks)


async def generates(gateway: FakeGateway, agents: list[FakeAgent], number: int = 1) -> Any:
    """Has a session on all agents, and every one of them say so."""
    await gateway.submit_session(number, budget_ns=600 * 10**9)
    start = await gateway.started(number)
    await gateway.progressed(number)
    gateway.waits = {number: (start.session_id,)}
    for agent in agents:
        agent.hold(start.session_id, route=start.route)
    return start


async def audited(process: SchedulerProcess, times: int = 3) -> None:
    done = process.leader().audits.audits
    await until(lambda: process.leader().audits.audits >= done + times, f"{times} audits")


async def test_what_everybody_holds_is_left_alone(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with ring(generating, crowd, tmp_path) as (process, gateway, agents):
        start = await generates(gateway, agents)
        await audited(process, 4)
        assert not agents[0].told_to_close(start.session_id)
        assert len(gateway.starts(1)) == 1
        async with admin(process.port) as stub:
            status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert status.audits >= 4
        assert status.leaks_mended == 0
        assert [(a.block_slots, a.used_block_slots) for a in status.agents] == [(6, 3), (6, 3)]


async def test_a_session_that_an_agent_forgot_is_started_again(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with ring(generating, crowd, tmp_path) as (process, gateway, agents):
        first = await generates(gateway, agents)
        agents[1].hold()
        second = await gateway.started(1, times=2)
        assert agents[0].told_to_close(first.session_id)
        gateway.waits = {1: (second.session_id,)}
        for agent in agents:
            agent.hold(second.session_id, route=second.route)
        assert await leaks(process) == {"session_lost": 1}


async def test_a_session_nobody_knows_is_closed(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with ring(generating, crowd, tmp_path) as (process, gateway, agents):
        start = await generates(gateway, agents)
        ghost = start.session_id + 1000
        agents[0].hold(start.session_id, ghost, route=start.route)
        await until(lambda: agents[0].told_to_close(ghost), "the ghost is closed")
        agents[0].hold(start.session_id, route=start.route)
        assert await leaks(process) == {"session_orphan": 1}
        assert not agents[0].told_to_close(start.session_id)


async def test_a_request_its_gateway_does_not_wait_for_is_ended(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with ring(generating, crowd, tmp_path) as (process, gateway, agents):
        start = await generates(gateway, agents)
        gateway.waits = {}
        await until(lambda: agents[0].told_to_close(start.session_id), "it is closed")
        for agent in agents:
            agent.hold()
        await nothing_is_left(process)
        assert await leaks(process) == {"request_unwanted": 1}


async def test_slots_are_booked_as_the_agent_has_them(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with ring(generating, crowd, tmp_path) as (process, gateway, agents):
        start = await generates(gateway, agents)
        assert agents[0].holds is not None
        agents[0].holds.sessions[0].route[0].first_block = 1
        slots = process.leader().slots
        await until(lambda: [h[2] for h in slots.holds(start.session_id)] == [2, 3], "two slots")
        assert await leaks(process) == {"slots_differ": 1}


async def test_a_batch_nobody_knows_is_cancelled(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured(**OFTEN)) as process:
        _, (agent,) = await crowd.serving(process.port)
        agent.hold()
        assert agent.holds is not None
        ghost = process.leader().first_id + 4711
        agent.holds.batches.add(batch_id=ghost)
        await until(
            lambda: any(ghost in each.batch_ids for each in agent.all("cancel_batch")), "cancelled"
        )
        agent.hold()
        assert await leaks(process) == {"batch_orphan": 1}


async def photographs(process: SchedulerProcess, crowd: Crowd) -> tuple[FakeGateway, FakeAgent]:
    gateway, (agent,) = await crowd.serving(process.port)
    return gateway, agent


def was_cancelled(agent: FakeAgent, batch: int) -> bool:
    return any(batch in each.batch_ids for each in agent.all("cancel_batch"))


async def test_what_ended_while_its_gateway_was_away_is_over_when_it_comes_back(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway, agent = await photographs(process, crowd)
        await gateway.submit(1)
        batch = (await gateway.dispatched(1)).batch_id
        await gateway.submit(2)
        kept = (await gateway.dispatched(2)).batch_id
        said = scheduler_pb2.Unanswered()
        said.requests.add(request_id=2)
        await gateway.send(scheduler_pb2.GatewayMessage(unanswered=said))
        await until(lambda: was_cancelled(agent, batch), "it is off")
        assert not was_cancelled(agent, kept)
        assert {r.number for r in process.leader().dispatcher.pooled.open_requests()} == {2}


async def test_rows_nobody_waits_for_are_not_asked_for_again(
    configured: Configured, crowd: Crowd
) -> None:
    """The gateway's word that it was cancelled may be lost: that it has no rows says so, too."""
    async with scheduler(configured()) as process:
        gateway, agent = await photographs(process, crowd)
        await gateway.submit(1)
        batch = (await gateway.dispatched(1)).batch_id
        gone = common_pb2.Failure(reason="CANCELLED", message="gone", retryable=True)
        failed = scheduler_pb2.DeliveryFailed(batch_id=batch, failure=gone)
        await gateway.send(scheduler_pb2.GatewayMessage(delivery_failed=failed))
        await until(lambda: was_cancelled(agent, batch), "it is off")
        assert not process.leader().dispatcher.pooled.open_requests()
        assert len(gateway.dispatches(1)) == 1


async def test_a_partition_that_an_agent_lost_is_loaded_again(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(**OFTEN)) as process:
        gateway, (agent,) = await crowd.serving(process.port)
        agent.holds = scheduler_pb2.Holdings()
        await until(lambda: len(agent.all("load_partition")) == 2, "it is loaded again")
        agent.hold()
        await until(lambda: gateway.ready, "ready again")
        assert await leaks(process) == {"partition_unhosted": 1}


async def test_rows_of_the_past_in_redis_do_not_stay_in_the_book(
    generating: Configured,
    crowd: Crowd,
    tmp_path: Path,
    server: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of Redis was put back: batches that end in an hour, sessions that ended long ago."""
    monkeypatch.setattr("catenary_scheduler.runtime.book_audit._CLAIMS_NS", 300_000_000)
    keys, half_ns = RedisKeys("main"), 1_800 * 10**9
    client = redis.asyncio.Redis.from_url(server.url)
    far = f"{half_ns} {half_ns + 10**9} {2 * half_ns}"
    rows = {
        "book:gpu/agent-0": {"77:0": f"{far} 0"},
        "book:gpu/agent-gone": {"78:0": f"{far} 0"},
        "book:cache/agent-0/llm:1[0,3)": {"66:0": f"0 {2 * half_ns} {2 * half_ns} 0 3"},
    }
    await client.hset(keys.table("resources"), mapping={name[5:]: "1" for name in rows})
    for name, fields in rows.items():
        await client.hset(keys.table(name), mapping=fields)
    redis_us = int((await client.time())[0]) * 10**6
    moment = {"scheduler_ns": 0, "redis_us": redis_us, "epoch": 0}
    await client.hset(keys.clock, mapping=moment)
    await client.aclose()
    async with ring(generating, crowd, tmp_path) as (process, _, agents):
        assert len(process.leader().book) == 2
        for agent in agents:
            agent.hold()
        await until(lambda: not process.leader().dispatcher.snapshot(), "nothing is left")
        found = await leaks(process)
        assert found == {"batch_unheld": 2}
