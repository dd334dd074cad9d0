"""Agents that fetch what they were ordered to load: whom they ask, and how long they may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.agents.load_orders import LoadOrders
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from scheduler_harness import AgentScript, Crowd, FakeAgent, admin, scheduler, until

Configured = Callable[..., SchedulerSettings]
MODEL, OTHER = ModelKey("toy", "1"), ModelKey("other", "1")
KEY = PartitionKey(MODEL, 0, 4)
AGENT = AgentId("agent-0")
MB = 1_000_000


async def tells(agent: FakeAgent, megabytes: int) -> None:
    fetch = scheduler_pb2.ContentFetch(
        model="toy",
        model_version="1",
        wanted_bytes=90 * MB,
        fetched_bytes=megabytes * MB,
        bytes_per_second=25 * MB,
    )
    beat = scheduler_pb2.Heartbeat(fetches=[fetch])
    await agent.send(scheduler_pb2.AgentMessage(heartbeat=beat))


async def test_an_order_names_the_gateways_and_those_who_have_loaded_the_model(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(expected_agents=2)) as process:
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")
        await crowd.agent(process.port, "agent-1")
        await until(lambda: gateway.ready, "ready")
        late = await crowd.agent(process.port, "agent-2")
        await until(lambda: late.all("load_partition"), "it is ordered")
        sources = list(late.all("load_partition")[-1].sources)
        assert sources[0] == "gateway-0"
        assert set(sources[1:]) == {"agent-0", "agent-1"}
        (served,) = gateway.all("models")[-1].models
        assert set(served.sources) >= {"gateway-0", "agent-0", "agent-1"}


async def test_what_an_agent_fetches_is_seen_by_operators_and_who_waits(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        await crowd.gateway(process.port)
        agent = await crowd.agent(process.port, "agent-0", AgentScript(hold_loads=True))
        await until(lambda: agent.all("load_partition"), "it is ordered")
        await tells(agent, 12)
        cluster = process.leader().cluster
        text = "agent-0 has fetched 12 of 90 MB (25 MB/s)"
        await until(lambda: text in cluster.reason(MODEL), "the reason says so")
        async with admin(process.port) as stub:
            status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        (fetch,) = status.agents[0].fetches
        assert (fetch.model, fetch.fetched_bytes, fetch.wanted_bytes) == ("toy", 12 * MB, 90 * MB)
        await agent.send(scheduler_pb2.AgentMessage(heartbeat=scheduler_pb2.Heartbeat()))
        await until(lambda: "fetched" not in cluster.reason(MODEL), "it has ended")


def test_an_order_has_its_whole_time_while_bytes_come() -> None:
    orders = LoadOrders(timeout_s=10.0)
    assert orders.is_due(AGENT, KEY, 0.0)
    for now_s in (8.0, 16.0, 24.0):
        orders.progressed(AGENT, MODEL, now_s)
        orders.expire(now_s + 9.0)
        assert orders.is_open(AGENT, KEY)
    orders.expire(34.0)
    assert not orders.is_open(AGENT, KEY)
    assert orders.problems(MODEL)


def test_a_load_without_progress_has_its_time_once_and_from_its_beginning() -> None:
    """Heartbeats go on, and say how long nothing has come of it."""
    orders = LoadOrders(timeout_s=10.0)
    assert orders.is_due(AGENT, KEY, 0.0)
    for now_s in (4.0, 8.0, 12.0):
        orders.progressed(AGENT, MODEL, 3.0)
        orders.expire(now_s)
        assert orders.is_open(AGENT, KEY)
    orders.progressed(AGENT, MODEL, 2.0)
    orders.expire(13.0)
    assert not orders.is_open(AGENT, KEY)


async def test_a_load_that_says_how_it_goes_on_is_not_late(
    configured: Configured, crowd: Crowd
) -> None:
    """An engine says what it does while it starts, which begins the step's age anew."""
    async with scheduler(configured(load_timeout_s=1.0)) as process:
        agent = await crowd.agent(process.port, "agent-0", AgentScript(hold_loads=True))
        await until(lambda: agent.all("load_partition"), "it is ordered")
        key = agent.all("load_partition")[-1].key
        cluster, step = process.leader().cluster, scheduler_pb2.STEP_KIND_LOADING
        for _ in range(20):
            told = scheduler_pb2.StepInHand(kind=step, age_ns=100_000_000, partition=key)
            beat = scheduler_pb2.Heartbeat(steps=[told])
            await agent.send(scheduler_pb2.AgentMessage(heartbeat=beat))
            await asyncio.sleep(0.1)
        assert "not done" not in cluster.reason(MODEL)
        await until(lambda: "was not done within" in cluster.reason(MODEL), "it is late")


def test_bytes_of_another_model_buy_no_time() -> None:
    orders = LoadOrders(timeout_s=10.0)
    assert orders.is_due(AGENT, KEY, 0.0)
    orders.progressed(AGENT, OTHER, 8.0)
    orders.expire(11.0)
    assert not orders.is_open(AGENT, KEY)
