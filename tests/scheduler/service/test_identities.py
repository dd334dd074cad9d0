"""Whoever opens a session is who they say they are; a gateway changes nothing by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, common_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.grpc.error_tables import grpc_code
from catenary_services.grpc.grpc_kit import open_channel
from catenary_services.security.identity import Role
from catenary_services.security.keys import add_key
from catenary_services.security.tls import ClientSecurity
from scheduler_harness import scheduler
from shared_helpers.control_streams import talking
from tests.support.certificates import Certificates

Configured = Callable[..., SchedulerSettings]


@dataclass
class Secured:
    """A scheduler with a certificate, and those of others."""

    process: SchedulerProcess
    certificates: Certificates
    admin_key: str

    def channel(self, role: str, name: str) -> grpc.aio.Channel:
        security: ClientSecurity = self.certificates.client(role, name)
        return open_channel(f"127.0.0.1:{self.process.port}", security, role=Role.SCHEDULER)

    async def greeted(self, role: str, name: str, hello: Any) -> str:
        """Returns "welcome", or the status of the refusal of a stream that begins with `hello`."""
        is_agent = isinstance(hello, scheduler_pb2.AgentHello)
        opens_as = Role.AGENT if is_agent else Role.GATEWAY
        pack = scheduler_pb2.AgentMessages if is_agent else scheduler_pb2.GatewayMessages
        message = scheduler_pb2.AgentMessage if is_agent else scheduler_pb2.GatewayMessage
        security: ClientSecurity = self.certificates.client(role, name)
        try:
            async with talking(
                f"127.0.0.1:{self.process.port}", opens_as, security=security
            ) as end:
                await end.write(pack(messages=[message(hello=hello)]))
                answer = await end.read()
                if answer is None:
                    assert end.error is not None
                    raise end.error
        except CatenaryError as error:
            return grpc_code(error).name
        return str(answer.messages[0].WhichOneof("kind"))

    async def drained(self, role: str, key: str = "") -> str:
        """Returns the status of an order to drain an agent that is not there."""
        async with self.channel(role, f"{role}-0") as channel:
            metadata = (("authorization", f"Bearer {key}"),) if key else None
            try:
                await admin_pb2_grpc.AdminStub(channel).DrainAgent(
                    admin_pb2.DrainAgentRequest(agent_id="agent-9"), metadata=metadata, timeout=10
                )
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"


@pytest.fixture
async def secured(configured: Configured, tmp_path: Path) -> AsyncIterator[Secured]:
    async with _serving(configured, tmp_path) as made:
        yield made


@asynccontextmanager
async def _serving(configured: Configured, tmp_path: Path) -> AsyncIterator[Secured]:
    certificates = Certificates(tmp_path / "certs")
    key = add_key(tmp_path / "keys.json", "operator", ["admin"])
    own = certificates.settings("scheduler", "scheduler-0")
    async with scheduler(configured(**own, api_keys_file=tmp_path / "keys.json")) as process:
        yield Secured(process, certificates, key)


def agent(name: str, peer_id: str | None = None) -> scheduler_pb2.AgentHello:
    return scheduler_pb2.AgentHello(
        agent_id=name,
        incarnation=1,
        peer=common_pb2.Peer(peer_id=peer_id or name),
        device="cpu",
        device_class="cpu",
        memory_bytes=10**9,
        server_id=name,
        virtual_level=1,
        link_bytes_per_second=10**9,
    )


def gateway(name: str, peer_id: str | None = None) -> scheduler_pb2.GatewayHello:
    peer = common_pb2.Peer(peer_id=peer_id or name)
    return scheduler_pb2.GatewayHello(gateway_id=name, incarnation=1, peer=peer)


async def test_sessions_are_for_whom_the_certificate_names(secured: Secured) -> None:
    assert await secured.greeted("agent", "a", agent("a")) == "welcome"
    assert await secured.greeted("gateway", "g", gateway("g")) == "welcome"
    for role, name, hello in (
        ("agent", "a", agent("b")),  # another agent
        ("gateway", "g", gateway("h")),  # another gateway
        ("agent", "a", gateway("a")),  # an agent as a gateway
        ("gateway", "g", agent("g")),  # a gateway as an agent
        ("operator", "o", gateway("o")),
        ("redis", "r", agent("r")),
    ):
        assert await secured.greeted(role, name, hello) == "PERMISSION_DENIED", (role, name)
    # Frames for others are not to come here.
    assert await secured.greeted("agent", "a", agent("a", peer_id="b")) == "INVALID_ARGUMENT"
    assert await secured.greeted("gateway", "g", gateway("g", peer_id="b")) == "INVALID_ARGUMENT"
    assert "b" not in secured.process.leader().cluster.registry


async def test_a_gateway_drains_only_with_an_operators_key(secured: Secured) -> None:
    # INVALID_ARGUMENT: it was let in, and there is no such agent.
    assert await secured.drained("operator") == "INVALID_ARGUMENT"
    assert await secured.drained("gateway", secured.admin_key) == "INVALID_ARGUMENT"
    assert await secured.drained("gateway") == "PERMISSION_DENIED"
    assert await secured.drained("gateway", "ctn_guess") == "PERMISSION_DENIED"
    assert await secured.drained("agent", secured.admin_key) == "PERMISSION_DENIED"
    async with secured.channel("gateway", "g") as channel:
        status = await admin_pb2_grpc.AdminStub(channel).GetStatus(
            admin_pb2.GetStatusRequest(), timeout=10
        )
    assert status.scheduler_id == "scheduler-0"


async def test_without_a_certificate_nobody_gets_anywhere(secured: Secured) -> None:
    port = secured.process.port
    nameless = ClientSecurity(ca_file=secured.certificates.ca_file)
    for security in (nameless, ClientSecurity(insecure=True)):
        async with open_channel(f"127.0.0.1:{port}", security, role=Role.SCHEDULER) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin_pb2_grpc.AdminStub(channel).GetStatus(
                    admin_pb2.GetStatusRequest(), timeout=5
                )
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("role", "name"), [("gateway", "scheduler-0"), ("scheduler", "other")])
def test_a_scheduler_does_not_start_as_somebody_else(
    configured: Configured, tmp_path: Path, role: str, name: str
) -> None:
    own = Certificates(tmp_path / "certs").settings(role, name)
    with pytest.raises(InvalidInput, match="but this is scheduler scheduler-0"):
        SchedulerProcess(configured(**own))
