"""A whole cluster in one process, every connection of it under mutual TLS, frames over TCP or gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from catenary_agent.process import AgentProcess
from catenary_agent.settings import AgentSettings
from catenary_gateway.process import GatewayProcess
from catenary_gateway.settings import GatewaySettings
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_scheduler.process import SchedulerProcess
from catenary_services.redis.embedded_redis import EmbeddedRedis
from scheduler_harness import add_model, settings
from tests.support.certificates import Certificates

AGENTS = ("agent-0", "agent-1")
ROWS = np.ones((2, 16), np.float32)
PLAN = """{"models": [{"name": "toy", "pipelines": [{"batch": 2, "partitions": [
    {"blocks": [0, 2], "agents": ["agent-0"]}, {"blocks": [2, 4], "agents": ["agent-1"]}]}]}]}"""


@dataclass
class Cluster:
    """Its processes, and how to ask it something."""

    certificates: Certificates
    gateway: GatewayProcess
    agents: list[AgentProcess]

    async def infer(self) -> tuple[int, ...]:
        """Returns the shape of an answer."""
        tensor = oip.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[2, 16])
        request = oip.ModelInferRequest(
            model_name="toy", inputs=[tensor], raw_input_contents=[ROWS.tobytes()]
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.gateway.grpc_port}") as channel:
            stub: Any = oip_grpc.GRPCInferenceServiceStub(channel)
            answer = await stub.ModelInfer(request, timeout=20)
        return tuple(answer.outputs[0].shape)

    def refused(self) -> float:
        """Returns how many frames were not taken because of who sent them."""
        registries = [
            self.gateway._metrics.registry,
            *(agent.metrics.registry for agent in self.agents),
        ]
        return sum(
            sample.value
            for registry in registries
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "catenary_frames_refused_total"
        )


@asynccontextmanager
async def running(tmp_path: Path, transport: str) -> AsyncIterator[Cluster]:
    certificates = Certificates(tmp_path / "certs")
    add_model(tmp_path / "models")
    (tmp_path / "plan.json").write_text(PLAN)
    async with AsyncExitStack() as stack:
        redis = EmbeddedRedis(tmp_path / "redis")
        await redis.start()
        stack.push_async_callback(redis.stop)
        own = certificates.settings("scheduler", "scheduler-0")
        values = settings(tmp_path, redis.url, plan_file=tmp_path / "plan.json", **own)
        scheduler = SchedulerProcess(values)
        stack.push_async_callback(scheduler.stop)
        await scheduler.start()
        meeting: dict[str, Any] = {
            "scheduler_addresses": [f"127.0.0.1:{scheduler.port}"],
            "transports": [transport],
            "model_repository": tmp_path / "models",
        }
        agents = []
        for name in AGENTS:
            fields = certificates.settings("agent", name) | meeting | {"agent_id": name}
            agent = AgentProcess(
                AgentSettings(**fields, device="emulated:p4", emulated_slowdown=0.01)
            )
            stack.push_async_callback(agent.stop)
            await agent.start()
            agents.append(agent)
        endpoints = {"grpc_port": 0, "http_port": 0, "admin_port": 0, "endpoints_insecure": True}
        fields = certificates.settings("gateway", "gateway-0") | meeting | endpoints
        gateway = GatewayProcess(GatewaySettings(gateway_id="gateway-0", **fields))
        stack.push_async_callback(gateway.stop)
        await gateway.start()
        await gateway.wait_ready(20)
        yield Cluster(certificates, gateway, agents)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_a_cluster_serves_under_mutual_tls_while_its_authority_changes(
    tmp_path: Path, transport: str
) -> None:
    async with running(tmp_path, transport) as cluster:
        assert await cluster.infer() == (2, 16)
        authority = cluster.certificates.authority
        for step in (authority.add_next, authority.use_next, authority.drop_others):
            step()
            for agent in cluster.agents:  # every link is made anew
                for peer_id, (_, link) in tuple(agent.hub._links.items()):
                    agent.hub._drop(peer_id, link)
            assert await cluster.infer() == (2, 16)
        answers = await asyncio.gather(*(cluster.infer() for _ in range(8)))
        assert answers == [(2, 16)] * 8
        assert cluster.refused() == 0
