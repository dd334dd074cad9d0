"""Agents whose copy of a model differs from the others'; scripted peers over real gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.values.stored import DeploymentSpec
from catenary_services.domain.ids import AgentId, ModelKey
from catenary_services.models.model_repository import ModelRepository
from chain_harness import chains, route
from scheduler_harness import LLM, TOY, AgentScript, Crowd, admin, scheduler, until

Configured = Callable[..., SchedulerSettings]
RIGHT, WRONG = "a" * 64, "b" * 64


def pool(*agents: str) -> dict[str, Any]:
    parts = [{"blocks": [0, 4], "agents": list(agents)}]
    return {"models": [{"name": "toy", "pipelines": [{"batch": 2, "partitions": parts}]}]}


async def problems(process: SchedulerProcess) -> dict[str, list[str]]:
    async with admin(process.port) as stub:
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
    return {
        each.agent_id: [said.why for said in each.impairments if said.kind == "cannot_load"]
        for each in status.agents
    }


def is_unable(process: SchedulerProcess, agent: str) -> bool:
    impairments = process.leader().availability.impairments(AgentId(agent))
    return any(each.kind == "cannot_load" for each in impairments)


def hosts(process: SchedulerProcess, agent: str) -> bool:
    record = process.leader().cluster.registry.get(AgentId(agent))
    return record is not None and bool(record.loaded)


async def test_the_odd_one_out_of_a_pool_serves_nothing_and_is_named(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(plan=pool("agent-0", "agent-1", "agent-2"))) as process:
        gateway = await crowd.gateway(process.port)
        for name, content in (("agent-0", RIGHT), ("agent-1", RIGHT), ("agent-2", WRONG)):
            await crowd.agent(process.port, name, AgentScript(content=content))
        await until(lambda: gateway.ready, "the others serve")
        await until(lambda: is_unable(process, "agent-2"), "it is found out")
        assert not hosts(process, "agent-2")
        assert hosts(process, "agent-0")
        said = await problems(process)
        assert said["agent-0"] == said["agent-1"] == []
        assert len(said["agent-2"]) == 1
        for number in range(6):
            await gateway.submit(number)
            dispatched = await gateway.dispatched(number)
            assert "agent-2" not in str(dispatched)


async def test_an_agent_that_comes_with_other_weights_is_told_to_give_them_up(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(plan=pool("agent-0", "agent-1"))) as process:
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0", AgentScript(content=RIGHT))
        key = scheduler_pb2.PartitionKey(model="toy", model_version="1", last_block=4)
        held = scheduler_pb2.PartitionLoaded(
            key=key, memory_bytes=8, compute_ns=[1, 1], content_digest=WRONG
        )
        await until(lambda: hosts(process, "agent-0"), "the first has loaded")
        other = await crowd.agent(
            process.port, "agent-1", AgentScript(content=WRONG, partitions=[held])
        )
        await until(lambda: other.all("unload_partition"), "it is told")
        await until(lambda: gateway.ready, "the other serves")
        assert len((await problems(process))["agent-1"]) == 1
        order = other.all("load_partition")
        if order:  # asked again, it is told what to load
            assert order[0].content_digest == RIGHT


async def test_the_leaders_own_copy_says_who_is_right(configured: Configured, crowd: Crowd) -> None:
    values = configured(plan=pool("agent-0", "agent-1", "agent-2"))
    repository = ModelRepository(values.model_repository)
    repository.model_file(TOY).write_bytes(b"weights")
    table = repository.folder(TOY) / "blocks.json"
    table.write_text(table.read_text().replace("0" * 64, repository.model_hash(TOY)))
    digest = repository.content_digest(TOY)
    async with scheduler(values) as process:
        gateway = await crowd.gateway(process.port)
        majority = [
            await crowd.agent(process.port, f"agent-{i}", AgentScript(content=WRONG))
            for i in (0, 1)
        ]
        await crowd.agent(process.port, "agent-2", AgentScript(content=digest))
        await until(lambda: gateway.ready, "the one that is right serves")
        assert majority[0].all("load_partition")[0].content_digest == digest
        assert not hosts(process, "agent-0")
        assert not hosts(process, "agent-1")
        await until(lambda: is_unable(process, "agent-1"), "both are named")
        assert (await problems(process))["agent-0"] == ["another copy here"]


async def test_agents_that_say_nothing_of_their_content_are_taken_as_they_are(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(plan=pool("agent-0", "agent-1"))) as process:
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0", AgentScript(content=RIGHT))
        await crowd.agent(process.port, "agent-1")  # an older one, or an emulated device
        await until(lambda: gateway.ready, "ready")
        await until(lambda: hosts(process, "agent-1"), "both host it")
        assert (await problems(process)) == {"agent-0": [], "agent-1": []}


@pytest.mark.parametrize("odd", ["agent-0", "agent-1"])
async def test_a_ring_with_an_agent_of_other_weights_is_never_formed(
    generating: Configured, crowd: Crowd, odd: str
) -> None:
    document = chains(
        (2, [("agent-0", 0, 3, 0), ("agent-1", 3, 6, 3)]), (2, [("agent-2", 0, 6, 0)])
    )
    async with scheduler(generating(plan=document)) as process:
        gateway = await crowd.gateway(process.port)
        # Two that agree outvote the third, whoever came first.
        for name in ("agent-0", "agent-1", "agent-2"):
            content = WRONG if name == odd else RIGHT
            await crowd.agent(process.port, name, AgentScript(content=content))
        await until(lambda: gateway.serves("llm"), "the whole chain serves")
        await until(lambda: is_unable(process, odd), "it is found out")
        for number in (1, 2):
            await gateway.submit_session(number)
            assert route(await gateway.started(number)) == [("agent-2", 0, 6)]
        assert (
            str(LLM) in (await problems(process))[odd][0]
            or "another copy" in ((await problems(process))[odd][0])
        )


async def test_nobody_waits_for_the_digest_of_a_large_model(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = ModelRepository(configured().model_repository)
    read = threading.Event()

    def reads_for_long(key: ModelKey) -> str:
        read.wait()
        return RIGHT

    monkeypatch.setattr(repository, "content_digest", reads_for_long)
    monkeypatch.setattr("catenary_scheduler.agents.deployments._CONTENT_S", 0.01)
    deployments = Deployments(repository)
    key = await deployments.deploy("toy", DeploymentSpec())
    assert deployments.ready[key].content == ""
    await deployments.deploy("toy", DeploymentSpec())  # once more while it is read
    assert deployments.ready[key].content == ""
    read.set()
    await until(lambda: deployments.ready[key].content == RIGHT, "it is entered")


async def test_a_model_whose_digest_cannot_be_known_late_is_served(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = ModelRepository(configured().model_repository)
    read, tried = threading.Event(), threading.Event()

    def fails_late(key: ModelKey) -> str:
        read.wait()
        tried.set()
        raise OSError("the disk is gone")

    monkeypatch.setattr(repository, "content_digest", fails_late)
    monkeypatch.setattr("catenary_scheduler.agents.deployments._CONTENT_S", 0.01)
    deployments = Deployments(repository)
    key = await deployments.deploy("toy", DeploymentSpec())
    read.set()
    await until(tried.is_set, "it was tried")
    assert deployments.ready[key].content == ""
    assert deployments.problems == {}
