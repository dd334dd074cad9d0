"""An agent that cannot load something holds nobody up; what it has loaded, it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.dispatch.availability import Impairment
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from scheduler_harness import (
    AgentScript,
    Crowd,
    FakeGateway,
    add_model,
    operated,
    scheduler,
    until,
)

Configured = Callable[..., SchedulerSettings]
TOY, CATS = ModelKey("toy", "1"), ModelKey("cats", "1")


def whole(model: str, *agents: str) -> dict[str, Any]:
    return {
        "name": model,
        "pipelines": [{"batch": 2, "partitions": [{"blocks": [0, 4], "agents": list(agents)}]}],
    }


BOTH = {"models": [whole("toy", "agent-0", "agent-1")]}


def reason(gateway: FakeGateway) -> str:
    model = gateway.model()
    return model.not_ready_reason if model is not None else ""


async def test_a_model_is_served_by_those_who_have_it(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured(expected_agents=2)) as process:
        gateway = await crowd.gateway(process.port)
        have = await crowd.agent(process.port, "agent-0")
        lack = await crowd.agent(process.port, "agent-1", AgentScript(lacks={"toy"}))
        await until(lambda: gateway.ready, "served without the one that lacks it")
        assert (0, 4) in have.loaded
        assert not lack.loaded
        await gateway.submit(1)
        assert [hop.agent_id for hop in (await gateway.dispatched(1)).route] == ["agent-0"]
        lack.script.lacks.clear()
        await until(lambda: list(lack.loaded), "it is asked again")
        await until(lambda: process.leader().cluster.is_settled, "and planned on again")
        assert list(lack.loaded) == [(0, 4)]


async def test_the_reason_names_the_machine_and_what_it_lacks(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured()) as (process, stub):
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-1", AgentScript(lacks={"toy"}))
        why = (
            "agent agent-1 on server agent-1 cannot load toy:1 blocks 0 to 4: "
            "toy is not in the model repository of this machine"
        )
        await until(lambda: why in reason(gateway), "the reason")
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        impairment = status.agents[0].impairments[-1]
        assert (impairment.kind, impairment.partition) == ("cannot_load", "toy:1[0,4)")
        assert "not in the model repository of this machine" in impairment.why
        assert "loading" not in reason(gateway)


async def test_a_new_session_of_an_agent_that_could_not_is_asked_at_once(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        first = await crowd.agent(process.port, "agent-0", AgentScript(lacks={"toy"}))
        failed = process.leader().availability.unable
        await until(lambda: len(first.all("load_partition")) >= 4, "it backs off", timeout_s=60)
        await first.close()
        await until(lambda: not failed(), "what it could not load is forgotten with it")
        await crowd.agent(process.port, "agent-0", AgentScript(incarnation=2))
        gateway = await crowd.gateway(process.port)
        await until(lambda: gateway.ready, "ready")


async def test_an_order_without_an_end_has_failed(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured(load_timeout_s=0.3, expected_agents=2)) as process:
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")
        stuck = await crowd.agent(process.port, "agent-1", AgentScript(hold_loads=True))
        await until(lambda: gateway.ready, "served without it")
        partition = PartitionKey(TOY, 0, 4)
        failure = process.leader().availability.failure(AgentId("agent-1"), partition)
        assert failure == "it was not done within 0.3 s"
        orders = len(stuck.all("load_partition"))
        await until(lambda: len(stuck.all("load_partition")) > orders, "it is asked again")


async def test_a_partition_is_served_while_another_of_the_same_agent_cannot_be_loaded(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_model(tmp_path / "models", CATS)
    plan = {"models": [whole("toy", "agent-0"), whole("cats", "agent-0")]}
    async with scheduler(configured(plan, models=["toy", "cats"])) as process:
        gateway, _ = await crowd.serving(process.port, AgentScript(lacks={"cats"}))
        await gateway.submit(1)
        await gateway.dispatched(1)
        cats = gateway.model("cats")
        assert cats is not None
        assert not cats.ready
        assert "cannot load cats:1" in cats.not_ready_reason


async def test_a_model_does_not_wait_for_the_slowest_of_its_agents(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(BOTH)) as process:
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")
        await crowd.agent(process.port, "agent-1", AgentScript(hold_loads=True))
        await until(lambda: gateway.ready, "ready")
        assert not process.leader().availability.unable()  # it may be loading still


async def test_work_goes_around_an_agent_in_quarantine_while_another_can_do_it(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(BOTH)) as (process, stub):
        gateway = await crowd.gateway(process.port)
        agents = {name: await crowd.agent(process.port, name) for name in ("agent-0", "agent-1")}
        availability, partition = process.leader().availability, PartitionKey(TOY, 0, 4)
        await until(lambda: len(availability.members(partition, map(AgentId, agents))) == 2, "both")
        why = "its epoch cannot be"
        availability.impair(AgentId("agent-0"), Impairment.QUARANTINED, why=why)
        for number in range(1, 5):
            await gateway.submit(number)
            batch = await gateway.dispatched(number)
            assert [hop.agent_id for hop in batch.route] == ["agent-1"]
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        shown = status.agents[0].impairments[0]
        assert (shown.kind, shown.why) == ("quarantined", why)
        await agents["agent-1"].close()
        await until(lambda: not availability.is_connected(AgentId("agent-1")), "gone")
        await gateway.submit(9)
        batch = await gateway.dispatched(9)  # better than nobody
        assert [hop.agent_id for hop in batch.route] == ["agent-0"]
