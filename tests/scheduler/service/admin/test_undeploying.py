"""Models are served no longer, drained agents are used again, and imports are passed on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.planning.requirements import agents_of
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import ContentMismatch
from scheduler_harness import Crowd, add_model, admin, operated, scheduler, until

Configured = Callable[..., SchedulerSettings]
LATE = ModelKey("late", "3")


def undeploy(model: str, version: str = "") -> admin_pb2.UndeployModelRequest:
    return admin_pb2.UndeployModelRequest(model=model, version=version)


async def refusal(call: grpc.aio.UnaryUnaryCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


async def test_an_undeployed_model_is_unloaded_and_its_requests_are_refused(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with operated(configured()) as (process, stub):
        gateway = await crowd.gateway(process.port)
        agent = await crowd.agent(process.port, "agent-0")
        add_model(tmp_path / "models", LATE)
        await stub.DeployModel(admin_pb2.DeployModelRequest(model="late"), timeout=10)
        await until(lambda: (late := gateway.model("late")) and late.ready, "it is ready")
        gone = await stub.UndeployModel(undeploy("late"), timeout=10)
        assert gone.version == "3"
        assert gone.plan_id == process.leader().cluster.plan_id
        await until(lambda: gateway.model("late") is None, "gateways have forgotten it")
        await until(
            lambda: all(
                key.model != LATE for key in process.leader().cluster.registry["agent-0"].loaded
            ),
            "the agent has unloaded it",
        )
        code, text = await refusal(stub.UndeployModel(undeploy("late")))
        assert (code, "'late' is not deployed" in text) == (grpc.StatusCode.NOT_FOUND, True)
        assert gateway.ready  # the other model is served as before
        assert agent is not None


async def test_the_last_model_may_be_undeployed_and_deployed_again(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured()) as (process, stub):
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")
        await until(lambda: gateway.ready, "ready")
        _, text = await refusal(stub.UndeployModel(undeploy("tay")))
        assert "did you mean 'toy'?" in text
        await stub.UndeployModel(undeploy("toy"), timeout=10)
        registry = process.leader().cluster.registry
        await until(lambda: not registry["agent-0"].loaded, "nothing is loaded any more")
        await stub.DeployModel(admin_pb2.DeployModelRequest(model="toy"), timeout=10)
        await until(lambda: gateway.ready, "ready again")


async def test_an_undeployed_model_of_the_settings_stays_so_under_the_next_leader(
    configured: Configured, crowd: Crowd
) -> None:
    standby = configured(scheduler_id="standby")
    async with operated(configured()) as (first, stub):
        await crowd.agent(first.port, "agent-0")
        await until(lambda: first.leader().deployments.ready, "deployed")
        second = SchedulerProcess(standby)  # it began before the model was undeployed
        await second.start()
        try:
            await stub.UndeployModel(undeploy("toy"), timeout=10)
            await first.drain(5.0)
            await until(lambda: second.leads, "the standby leads")
            assert not second.leader().deployments.ready
            assert second.leader().deployments.is_empty
            await second.drain(5.0)
        finally:
            await second.stop()
    async with scheduler(configured(scheduler_id="later")) as later:  # was started with it since
        await until(lambda: later.leads, "it leads")
        await until(lambda: later.leader().deployments.ready, "what was said last counts")


async def test_several_versions_and_plans_by_hand_are_not_guessed_at(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with operated(configured()) as (process, stub):
        await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")
        add_model(tmp_path / "models", ModelKey("toy", "2"))
        request = admin_pb2.DeployModelRequest(model="toy", version="2")
        await stub.DeployModel(request, timeout=10)
        code, text = await refusal(stub.UndeployModel(undeploy("toy")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "versions 1, 2: name one" in text
        pool = {"batch": 1, "partitions": [{"blocks": [0, 4], "agents": ["agent-0"]}]}
        plan = {"models": [{"name": "toy", "version": "2", "pipelines": [pool]}]}
        await stub.ApplyPlan(_plan_request(plan), timeout=10)
        code, text = await refusal(stub.UndeployModel(undeploy("toy", "2")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "the plan applied by hand" in text


def _plan_request(document: dict[str, object]) -> admin_pb2.ApplyPlanRequest:
    return admin_pb2.ApplyPlanRequest(plan_json=json.dumps(document))


async def test_a_drained_agent_is_used_again(configured: Configured, crowd: Crowd) -> None:
    async with operated(configured(expected_agents=2)) as (process, stub):
        await crowd.serving(process.port, agents=2)
        leader = process.leader()

        def used() -> set[str]:
            active = leader.cluster.active
            return set(agents_of(active.placement)) if active is not None else set()

        before = used()
        drain = admin_pb2.DrainAgentRequest(agent_id="agent-1")
        assert (await stub.DrainAgent(drain, timeout=10)).drained
        await until(lambda: used() == {"agent-0"}, "a plan without it")
        undrain = admin_pb2.UndrainAgentRequest(agent_id="agent-1")
        await stub.UndrainAgent(undrain, timeout=10)
        await until(lambda: used() == before, "a plan with it")
        code, text = await refusal(stub.UndrainAgent(undrain))
        assert (code, text) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "agent_id: 'agent-1' is not drained",
        )
        _, text = await refusal(
            stub.UndrainAgent(admin_pb2.UndrainAgentRequest(agent_id="agent-11"))
        )
        assert "is not connected; did you mean 'agent-1'?" in text


async def test_an_agent_that_is_about_to_stop_is_not_taken_back(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(expected_agents=2)) as (process, stub):
        _, agents = await crowd.serving(process.port, agents=2)
        registry = process.leader().cluster.registry
        await agents[1].send(scheduler_pb2.AgentMessage(drained=scheduler_pb2.Drained()))
        await until(lambda: registry["agent-1"].is_stopping, "it has said so")
        code, text = await refusal(
            stub.UndrainAgent(admin_pb2.UndrainAgentRequest(agent_id="agent-1"))
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "about to stop" in text


class Importer:
    """Tells two steps, then fails, or goes on until it is closed."""

    def __init__(self, *, fails: bool) -> None:
        self.requests: list[admin_pb2.ImportModelRequest] = []
        self.closed = asyncio.Event()
        self._fails = fails

    async def bring(
        self, request: admin_pb2.ImportModelRequest
    ) -> AsyncGenerator[admin_pb2.ImportProgress, None]:
        self.requests.append(request)
        try:
            yield admin_pb2.ImportProgress(phase="listed", text="all of it")
            if self._fails:
                raise ContentMismatch("a.gguf is not what its source says")
            while True:
                yield admin_pb2.ImportProgress(phase="fetching", file="a.gguf")
                await asyncio.sleep(0.05)
        finally:
            self.closed.set()


@contextlib.asynccontextmanager
async def importing(
    settings: SchedulerSettings, importer: Importer | None
) -> AsyncGenerator[tuple[SchedulerProcess, grpc.aio.UnaryStreamMultiCallable], None]:
    process = SchedulerProcess(settings, importer=importer)
    await process.start()
    try:
        await until(lambda: process.leads, "it leads")
        async with admin(process.port) as stub:
            yield process, stub.ImportModel
    finally:
        await process.stop()


async def test_an_import_is_passed_on_and_ends_with_its_caller(
    configured: Configured, crowd: Crowd
) -> None:
    importer = Importer(fails=False)
    async with importing(configured(), importer) as (process, import_model):
        await crowd.agent(process.port, "agent-0")
        call = import_model(admin_pb2.ImportModelRequest(source="hf:org/tiny"))
        seen = [await call.read() for _ in range(3)]
        assert [each.phase for each in seen] == ["listed", "fetching", "fetching"]
        assert importer.requests[0].target == "both"  # the agents are no GPUs
        assert not importer.closed.is_set()
        call.cancel()
        await asyncio.wait_for(importer.closed.wait(), 60)


async def test_the_failure_of_an_import_has_its_reason(configured: Configured) -> None:
    async with importing(configured(), Importer(fails=True)) as (_, import_model):
        call = import_model(admin_pb2.ImportModelRequest(source="hf:org/tiny"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"a.gguf is not what its source says"):
            [step async for step in call]
    async with importing(configured(scheduler_id="plain"), None) as (_, import_model):
        call = import_model(admin_pb2.ImportModelRequest(source="hf:org/tiny"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [step async for step in call]
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
