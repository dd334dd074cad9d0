"""The port for probes, asked by a real gRPC client as Kubernetes asks."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary_services.errors import Unavailable
from catenary_services.grpc.probes import LEADER, LIVE, READY, Probes

SERVING = health_pb2.HealthCheckResponse.SERVING


async def statuses(channel: grpc.aio.Channel, *names: str) -> list[bool]:
    stub = health_pb2_grpc.HealthStub(channel)
    requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
    return [(await stub.Check(request)).status == SERVING for request in requests]


async def test_it_lives_before_it_is_ready() -> None:
    probes = Probes()
    port = await probes.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await statuses(channel, LIVE, READY, "") == [True, False, False]
        probes.set_ready(True)
        assert await statuses(channel, LIVE, READY, "") == [True, True, True]
        probes.set_ready(False)
        assert await statuses(channel, LIVE, READY) == [True, False]
        await probes.stop()


async def test_what_was_told_before_the_start_counts() -> None:
    probes = Probes(LEADER)
    probes.set_ready(True)
    probes.set(LEADER, True)
    port = await probes.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await statuses(channel, READY, LEADER) == [True, True]
    await probes.stop()


async def test_an_unknown_name_is_not_found_and_other_services_are_not_there() -> None:
    probes = Probes()
    port = await probes.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await statuses(channel, LEADER)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        other = channel.unary_unary("/catenary.v1.Admin/GetStatus")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await probes.stop()


async def test_watchers_hear_the_end() -> None:
    probes = Probes()
    port = await probes.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=LIVE)
        )
        assert (await watch.read()).status == SERVING
        await probes.stop()
        async with asyncio.timeout(30):
            assert (await watch.read()).status != SERVING


async def test_a_taken_port_is_said() -> None:
    probes, other = Probes(), Probes()
    port = await probes.start("127.0.0.1", 0)
    with pytest.raises(Unavailable):
        await other.start("127.0.0.1", port)
    await other.stop()
    await probes.stop()


async def test_watchers_never_keep_probes_from_being_answered() -> None:
    probes = Probes()
    port = await probes.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=LIVE)
        watches = [stub.Watch(request) for _ in range(80)]
        first = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        assert sum(isinstance(each, grpc.aio.AioRpcError) for each in first) >= 80 - 16
        assert await statuses(channel, LIVE) == [True]
        for watch in watches:
            watch.cancel()
        await probes.stop()
