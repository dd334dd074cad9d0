"""A gateway between two scheduler groups, over real streams and transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from catenary_gateway.process import GatewayProcess
from catenary_gateway.settings import GatewaySettings
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, common_pb2, scheduler_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.domain.groups import next_epoch
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.settings import TransportSettings
from gateway_harness import AGENT, GATEWAY, Down, EchoAgent, ScriptedScheduler, echo
from shared_helpers.peers import peer_of
from shared_helpers.waiting import until

GROUPS = 2


@dataclass
class Groups:
    gateway: GatewayProcess
    schedulers: list[ScriptedScheduler]
    agent: EchoAgent
    infer: oip_grpc.GRPCInferenceServiceStub

    @property
    def links(self) -> list[object]:
        return list(self.gateway._schedulers.links)

    async def ask(self, value: float) -> float:
        values = np.full((1, 4), value, np.float32)
        request = oip.ModelInferRequest(model_name="toy")
        request.inputs.add(name="in_0", datatype="FP32", shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
        answer = await self.infer.ModelInfer(request)
        return float(np.frombuffer(answer.raw_output_contents[0], np.float32)[0])

    async def shares(self, count: int) -> list[int]:
        """Asks so often and returns how many requests came to each group."""
        for scheduler in self.schedulers:
            while not scheduler.heard.empty():
                scheduler.heard.get_nowait()
        answers = await asyncio.gather(*(self.ask(n) for n in range(count)))
        assert answers == list(range(count))
        return [self._submitted(scheduler) for scheduler in self.schedulers]

    def _submitted(self, scheduler: ScriptedScheduler) -> int:
        kinds = []
        while not scheduler.heard.empty():
            kinds.append(scheduler.heard.get_nowait().WhichOneof("kind"))
        return kinds.count("submit")

    def counted(self, reason: str) -> float:
        registry = self.gateway._metrics.registry
        name = "catenary_reroutes_total"
        return registry.get_sample_value(name, {"reason": reason}) or 0.0


async def led_by(group: int, workers: int, peers: list[common_pb2.Peer]) -> ScriptedScheduler:
    toy = echo("toy", ("FP32", -1, 4), workers=workers)
    scheduler = ScriptedScheduler([toy])
    scheduler.group, scheduler.epoch = str(group), next_epoch(0, group, GROUPS)
    scheduler.peers = peers
    await scheduler.start()
    return scheduler


@asynccontextmanager
async def groups(tmp_path: Path, workers: tuple[int, int] = (1, 1)) -> AsyncIterator[Groups]:
    hub = TransportHub(AGENT, TransportSettings(runtime_dir=tmp_path / "run"))
    agent = EchoAgent(hub)
    await hub.start(agent.receive)
    # Only one of the groups knows the agent: whoever orders, the gateway finds it.
    schedulers = [
        await led_by(0, workers[0], [peer_of(AGENT, hub)]),
        await led_by(1, workers[1], []),
    ]
    gateway = GatewayProcess(
        GatewaySettings(
            gateway_id=GATEWAY,
            grpc_port=0,
            http_port=0,
            admin_port=0,
            insecure=True,
            scheduler_addresses=[f"127.0.0.1:{each.port}" for each in schedulers],
            scheduler_groups=GROUPS,
            runtime_dir=tmp_path / "run",
            unavailable_grace_s=0.3,
        )
    )
    try:
        await gateway.start()
        hub.update_directory([(await schedulers[0].hear("hello")).peer])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            stage = Groups(gateway, schedulers, agent, oip_grpc.GRPCInferenceServiceStub(channel))
            tables = gateway._schedulers._models
            await until(lambda: len(tables.weights("toy", "1", range(GROUPS))) == GROUPS)
            yield stage
    finally:
        await gateway.stop()
        for task in list(agent.tasks):
            task.cancel()
        await hub.close()
        for scheduler in schedulers:
            await scheduler.stop()


def full(submit: scheduler_pb2.SubmitRequest) -> list[Down]:
    failure = common_pb2.Failure(reason="OVERLOADED", message="no room")
    order = scheduler_pb2.RejectRequest(
        request_id=submit.request_id, failure=failure, retry_after_ns=10**7
    )
    return [Down(reject=order)]


async def test_requests_go_round_robin_by_the_workers_of_the_groups(tmp_path: Path) -> None:
    async with groups(tmp_path, workers=(3, 1)) as stage:
        assert await stage.shares(16) == [12, 4]
        table = stage.schedulers[1].models
        table[0].workers = 3
        stage.schedulers[1].send(Down(models=scheduler_pb2.ModelTable(models=table)))
        tables = stage.gateway._schedulers._models
        await until(lambda: tables.weights("toy", "1", [1]) == {1: 3})
        assert await stage.shares(12) == [6, 6]


async def test_a_group_without_room_passes_a_request_on_and_both_without_refuse(
    tmp_path: Path,
) -> None:
    async with groups(tmp_path) as stage:
        stage.schedulers[0].script = full
        answers = await asyncio.gather(*(stage.ask(n) for n in range(8)))
        assert answers == list(range(8))
        assert stage.counted("OVERLOADED") == 4
        stage.schedulers[1].script = full
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stage.ask(1)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stage.counted("OVERLOADED") == 5
        assert not stage.gateway._schedulers._router._group_of


async def test_while_a_group_has_no_leader_the_other_serves_and_its_requests_wait_for_it(
    tmp_path: Path,
) -> None:
    async with groups(tmp_path) as stage:
        first = stage.schedulers[0]
        held: list[scheduler_pb2.SubmitRequest] = []
        first.script = lambda submit: held.append(submit) or []
        waiting = [asyncio.ensure_future(stage.ask(n)) for n in range(4)]
        await until(lambda: len(held) == 2)
        stage.gateway._schedulers._listeners[0]._context.grace_s = 30.0
        await first.stop()
        await until(lambda: not stage.links[0].is_connected)
        assert await stage.ask(7) == 7
        done = [task for task in waiting if task.done()]
        assert len(done) == 2
        # Another process leads the first group from now on; it is told of what it must do.
        second_of_first = await led_by(0, 1, first.peers)
        second_of_first.epoch += 64
        stage.links[0]._addresses += (f"127.0.0.1:{second_of_first.port}",)
        assert await asyncio.gather(*waiting) == [0, 1, 2, 3]
        assert stage.gateway._readiness.ready
        assert not stage.counted("GROUP_AWAY")
        await second_of_first.stop()


async def test_a_group_that_nobody_leads_for_long_loses_what_it_did_not_begin(
    tmp_path: Path,
) -> None:
    async with groups(tmp_path) as stage:
        stage.schedulers[0].script = lambda _: []
        waiting = [asyncio.ensure_future(stage.ask(n)) for n in range(4)]
        await stage.schedulers[0].hear("submit")
        await stage.schedulers[0].hear("submit")
        await stage.schedulers[0].stop()
        assert await asyncio.gather(*waiting) == [0, 1, 2, 3]
        assert stage.counted("GROUP_AWAY") == 2
        assert stage.gateway._readiness.ready


async def test_operators_see_all_groups_at_once_or_one_of_them(tmp_path: Path) -> None:
    async with (
        groups(tmp_path) as stage,
        grpc.aio.insecure_channel(f"127.0.0.1:{stage.gateway.admin_port}") as channel,
    ):
        stub = admin_pb2_grpc.AdminStub(channel)
        ask = admin_pb2.GetStatusRequest()
        status = await stub.GetStatus(ask)
        assert [agent.agent_id for agent in status.agents] == ["of-0", "of-1"]
        assert [group.scheduler_id for group in status.groups] == ["s0", "s1"]
        one = await stub.GetStatus(ask, metadata=(("catenary-group", "1"),))
        assert one.scheduler_id == "s1"
        assert not one.groups
        deployed = await stub.DeployModel(admin_pb2.DeployModelRequest(model="m"))
        assert deployed.plan_id == "with m:"
        undeployed = await stub.UndeployModel(admin_pb2.UndeployModelRequest(model="m"))
        assert (undeployed.plan_id, undeployed.version) == ("without m", "1")
        await stub.UndrainAgent(admin_pb2.UndrainAgentRequest(agent_id="of-1"))
        assert "undrain of-1" not in stage.schedulers[0].presented
        assert "undrain of-1" in stage.schedulers[1].presented
        with pytest.raises(grpc.aio.AioRpcError, match=r"'of-9' is not connected"):
            await stub.UndrainAgent(admin_pb2.UndrainAgentRequest(agent_id="of-9"))
        imported = stub.ImportModel(admin_pb2.ImportModelRequest(source="hf:org/m"))
        assert [step.phase async for step in imported] == ["listed", "done"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ApplyPlan(admin_pb2.ApplyPlanRequest(plan_json="{}"))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await stage.schedulers[0].stop()
        await until(lambda: not stage.links[0].is_connected)
        left = await stub.GetStatus(ask)
        assert [group.scheduler_id for group in left.groups] == ["", "s1"]
