from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.errors import Unavailable
from catenary_services.grpc.grpc_kit import (
    HealthSwitch,
    bind,
    create_server,
    enable_health_and_reflection,
    open_channel,
)
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.security.tls import ClientSecurity, ServerSecurity

OPEN_SERVER, OPEN_CLIENT = ServerSecurity(insecure=True), ClientSecurity(insecure=True)
SERVICES = [
    oip.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"],
]
T = TypeVar("T")
STATUS = health_pb2.HealthCheckResponse


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[int, HealthSwitch, GrpcServer]]:
    server = create_server(OPEN_SERVER)
    switch = enable_health_and_reflection(server, SERVICES)
    port = bind(server, "127.0.0.1", 0, OPEN_SERVER)
    await server.start()
    try:
        yield port, switch, server
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[grpc.aio.Channel, HealthSwitch, GrpcServer]]:
    async with serving() as (port, switch, server):
        channel = open_channel(f"127.0.0.1:{port}", OPEN_CLIENT)
        yield channel, switch, server
        await channel.close()


@pytest.fixture
async def health() -> AsyncIterator[tuple[health_pb2_grpc.HealthStub, HealthSwitch]]:
    async with connected() as (channel, switch, _):
        yield health_pb2_grpc.HealthStub(channel), switch


async def check(stub: health_pb2_grpc.HealthStub, service: str = "") -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return int(answer.status)


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "catenary.v1.Admin"])
async def test_health_follows_the_switch(
    health: tuple[health_pb2_grpc.HealthStub, HealthSwitch], service: str
) -> None:
    stub, switch = health
    assert await check(stub, service) == STATUS.NOT_SERVING
    switch.set_serving(True)
    assert await check(stub, service) == STATUS.SERVING
    await switch.shutdown()
    switch.set_serving(True)
    assert await check(stub, service) == STATUS.NOT_SERVING


async def test_health_of_an_unknown_service_is_not_found(
    health: tuple[health_pb2_grpc.HealthStub, HealthSwitch],
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(health[0], "no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_every_change_and_ends_at_shutdown(
    health: tuple[health_pb2_grpc.HealthStub, HealthSwitch],
) -> None:
    stub, switch = health
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)
    assert (await watch.read()).status == STATUS.NOT_SERVING
    switch.set_serving(True)
    assert (await watch.read()).status == STATUS.SERVING
    switch.set_serving(False)
    assert (await watch.read()).status == STATUS.NOT_SERVING
    await switch.shutdown()
    assert await watch.read() is grpc.aio.EOF


async def test_watch_of_an_unknown_service_stays_open(
    health: tuple[health_pb2_grpc.HealthStub, HealthSwitch],
) -> None:
    watch = health[0].Watch(health_pb2.HealthCheckRequest(service="later"), timeout=10)
    assert (await watch.read()).status == STATUS.SERVICE_UNKNOWN
    watch.cancel()


async def test_watchers_do_not_hold_back_the_stop() -> None:
    async with connected() as (channel, switch, server):
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=""), timeout=30
        )
        await watch.read()
        await switch.shutdown()
        async with asyncio.timeout(30):
            await server.stop(30)


async def in_thread(work: Callable[[], T]) -> T:
    return await asyncio.wait_for(asyncio.to_thread(work), 20)


async def test_unmodified_reflection_client_sees_services_of_both_pools() -> None:
    async with serving() as (port, _, _server):

        def reflect() -> tuple[list[str], list[str], list[str]]:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                pool = DescriptorPool(database)
                inference = pool.FindServiceByName("inference.GRPCInferenceService")
                admin = pool.FindServiceByName("catenary.v1.Admin")
                pool.FindServiceByName("grpc.health.v1.Health")
                pool.FindMessageTypeByName("catenary.v1.GatewayMessages")
                request = pool.FindMessageTypeByName("inference.ModelInferRequest")
                assert request.fields_by_name["raw_input_contents"].number == 7
                return (
                    list(database.get_services()),
                    [method.name for method in inference.methods],
                    [method.name for method in admin.methods],
                )

        services, inference, admin = await in_thread(reflect)
    assert set(services) == {
        "inference.GRPCInferenceService",
        "catenary.v1.Admin",
        "catenary.v1.Scheduler",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert {"ModelInfer", "ModelStreamInfer", "ServerReady"} <= set(inference)
    assert "GetStatus" in admin


async def test_reflection_sends_dependencies_with_a_file() -> None:
    async with connected() as (channel, _, _server):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=5)
        await call.write(
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="catenary.v1.Scheduler")
        )
        answer = await call.read()
        await call.done_writing()
    files = answer.file_descriptor_response.file_descriptor_proto
    names = {descriptor_pb2.FileDescriptorProto.FromString(file).name for file in files}
    assert names == {
        "catenary/v1/scheduler.proto",
        "catenary/v1/common.proto",
        "catenary/v1/rules.proto",
        "google/protobuf/descriptor.proto",
    }


class Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    async def answer(self, request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return request


async def test_message_limit_is_ours_and_not_four_megabytes() -> None:
    limit = 6 * 1024 * 1024
    server = create_server(OPEN_SERVER, max_message_bytes=limit)
    server.add_generic_rpc_handlers([Echo()])
    port = bind(server, "127.0.0.1", 0, OPEN_SERVER)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", OPEN_CLIENT) as channel:
        call = channel.unary_unary("/a/b")
        assert len(await call(bytes(limit - 1024), timeout=20)) == limit - 1024
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(limit + 1024), timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


async def test_port_of_another_server_is_refused_not_shared() -> None:
    async with serving() as (port, _, _server):
        second = create_server(OPEN_SERVER)
        with pytest.raises(Unavailable):
            bind(second, "127.0.0.1", port, OPEN_SERVER)


async def test_channel_finds_a_server_that_came_back() -> None:
    async with serving() as (port, _, _server):
        channel = open_channel(f"127.0.0.1:{port}", OPEN_CLIENT)
        stub = health_pb2_grpc.HealthStub(channel)
        await check(stub)
    with pytest.raises(grpc.aio.AioRpcError):
        await check(stub)
    server = create_server(OPEN_SERVER)
    enable_health_and_reflection(server, SERVICES)
    bind(server, "127.0.0.1", port, OPEN_SERVER)
    await server.start()
    try:
        answer = await stub.Check(
            health_pb2.HealthCheckRequest(service=""), timeout=5, wait_for_ready=True
        )
        assert answer.status == STATUS.NOT_SERVING
    finally:
        await channel.close()
        await server.stop(None)


async def test_proxy_settings_of_the_machine_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with connected() as (channel, _, _server):
        assert await check(health_pb2_grpc.HealthStub(channel)) == STATUS.NOT_SERVING
