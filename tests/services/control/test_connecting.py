"""Who looks for a scheduler finds its control endpoint, or is told why not in one sentence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_services.control.arrival_budget import ArrivalBudget
from catenary_services.control.connecting import Heartbeats, connected
from catenary_services.control.control_stream import ControlStream
from catenary_services.errors import (
    CatenaryError,
    NotSupported,
    PermissionDenied,
    Unavailable,
)
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.tcp_listener import TcpListener
from catenary_services.transport.frames import MessageKind
from shared_helpers.control_streams import ScriptedEnd, ScriptedEndpoint, opened, talking
from tests.support.certificates import Certificates


class Echo(ScriptedEndpoint):
    """Sends every pack back, as gateways are told it."""

    def __init__(self, why_not: CatenaryError | None = None) -> None:
        super().__init__()
        self.why_not = why_not
        self.groups: list[int] = []

    def refusal(self, group: int) -> CatenaryError | None:
        return self.why_not

    async def serve(self, end: ScriptedEnd) -> None:
        self.groups.append(end.group)
        while (pack := await end.read()) is not None:
            down = scheduler_pb2.SchedulerToGatewayMessages()
            for _ in pack.messages:
                down.messages.add(heartbeat=scheduler_pb2.Heartbeat())
            await end.write(down)


@asynccontextmanager
async def serving(endpoint: ScriptedEndpoint | None) -> AsyncIterator[str]:
    """A gRPC server with this endpoint, or with none; its address."""
    server = grpc.aio.server()
    if endpoint is not None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(endpoint, server)  # type: ignore[no-untyped-call]
        await endpoint.listen()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        if endpoint is not None:
            await endpoint.hang_up()
        await server.stop(0)


async def test_packs_go_both_ways_and_the_group_is_named() -> None:
    endpoint = Echo()
    async with (
        serving(endpoint) as address,
        talking(address, Role.GATEWAY, group=3) as end,
        asyncio.timeout(30),
    ):
        beat = scheduler_pb2.GatewayMessage(heartbeat=scheduler_pb2.Heartbeat())
        await end.write(scheduler_pb2.GatewayMessages(messages=[beat] * 3))
        assert len((await end.read()).messages) == 3
    assert endpoint.groups == [3]


async def test_a_standby_says_so() -> None:
    async with serving(Echo(Unavailable("stands by"))) as address:
        with pytest.raises(Unavailable, match="stands by"):
            await opened(address, Role.GATEWAY)


async def test_a_scheduler_of_a_release_without_control_streams_is_named() -> None:
    async with serving(None) as address:
        with pytest.raises(NotSupported, match=f"{address} is of a release with other control"):
            await opened(address, Role.AGENT)


async def test_where_nobody_listens_it_says_where() -> None:
    stream = ControlStream(ScriptedEnd(), ArrivalBudget(1 << 20))
    listener = TcpListener(lambda _: asyncio.Protocol(), None)
    port = await listener.start("127.0.0.1", 0)
    listener.close()
    with pytest.raises(Unavailable, match=f"control streams at 127.0.0.1:{port}"):
        await connected(stream, "127.0.0.1", port, Role.AGENT, ClientSecurity(insecure=True))


@pytest.mark.parametrize("role", ["scheduler", "agent"])
async def test_only_a_scheduler_is_given_a_stream(tmp_path: Path, role: str) -> None:
    certificates = Certificates(tmp_path)
    security: ServerSecurity = certificates.server(role, f"{role}-0")
    end = ScriptedEnd()

    def accepted(settled: object) -> ControlStream:
        end.opened = settled  # type: ignore[assignment]
        return end.stream

    listener = TcpListener(accepted, security.ssl_context())
    port = await listener.start("127.0.0.1", 0)
    mine = ScriptedEnd(scheduler_pb2.SchedulerToAgentMessages)
    client = certificates.client("agent", "agent-1")
    try:
        if role == "scheduler":
            await connected(mine.stream, "127.0.0.1", port, Role.AGENT, client)
            await mine.write(scheduler_pb2.AgentMessages())
            async with asyncio.timeout(30):
                assert await end.read() == scheduler_pb2.AgentMessages()
        else:
            with pytest.raises(PermissionDenied, match="may not take control streams"):
                await connected(mine.stream, "127.0.0.1", port, Role.AGENT, client)
    finally:
        mine.stream.abort()
        end.stream.abort()
        listener.close()


async def test_a_silent_scheduler_is_given_up_and_one_that_is_heard_is_not() -> None:
    async with serving(Echo()) as address, talking(address, Role.GATEWAY) as end:
        beats: list[float] = []

        def beat() -> None:
            beats.append(time.monotonic())
            if len(beats) <= 10:
                message = scheduler_pb2.GatewayMessage(heartbeat=scheduler_pb2.Heartbeat())
                pack = scheduler_pb2.GatewayMessages(messages=[message])
                end.stream.write(MessageKind.PACK, pack.SerializeToString())

        heartbeats = Heartbeats(end.stream, beat, interval_s=0.05, silence_s=1.5)
        try:
            async with asyncio.timeout(30):
                while await end.read() is not None:
                    pass
        finally:
            heartbeats.stop()
        assert isinstance(end.error, Unavailable)
        assert "silent for 1.5 s" in end.error.message
        assert len(beats) > 10  # as long as there were answers it went on
