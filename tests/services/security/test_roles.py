from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from catenary_protos.catenary.v1 import admin_pb2, generation_pb2, scheduler_pb2
from catenary_protos.externalscaler import externalscaler_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.grpc.grpc_kit import bind, create_server, open_channel
from catenary_services.security.identity import Role
from catenary_services.security.keys import ApiKeys, add_key
from catenary_services.security.roles import CHANGE, RULES, RoleAuthorizer
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from tests.support.certificates import Certificates

SERVED = (
    scheduler_pb2.DESCRIPTOR,
    admin_pb2.DESCRIPTOR,
    generation_pb2.DESCRIPTOR,
    oip.DESCRIPTOR,
    externalscaler_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
FRAMES = "/catenary.v1.PeerTransport/Frames"
DRAIN = "/catenary.v1.Admin/DrainAgent"
STATUS = "/catenary.v1.Admin/GetStatus"
UNKNOWN = "/catenary.v1.Admin/Invented"


class Answers(grpc.GenericRpcHandler):
    """Answers every method of any kind with what it was sent."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method.endswith("Session"):
            return grpc.stream_stream_rpc_method_handler(self.stream)
        return grpc.unary_unary_rpc_method_handler(self.answer)

    async def answer(self, request: bytes, _: object) -> bytes:
        return request

    async def stream(self, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("roles") / "certs")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[ApiKeys, dict[str, str]]:
    file = tmp_path / "keys.json"
    secrets = {scope: add_key(file, scope, [scope]) for scope in ("admin", "view", "infer")}
    return ApiKeys.load(file), secrets


@asynccontextmanager
async def serving(certificates: Certificates, keys: ApiKeys | None = None) -> AsyncIterator[int]:
    security = certificates.server("scheduler", "scheduler-0")
    server = create_server(security, authorizer=RoleAuthorizer("main", keys, insecure=False))
    server.add_generic_rpc_handlers((Answers(),))
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    yield port
    await server.stop(0)


async def outcome(
    port: int, security: ClientSecurity, method: str, key: str = "", role: Role = Role.SCHEDULER
) -> str:
    """Returns "OK" or the status a call ended with."""
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    async with open_channel(f"127.0.0.1:{port}", security, role=role) as channel:
        try:
            if method.endswith("Session"):
                call = channel.stream_stream(method)(metadata=metadata, timeout=10)
                await call.write(b"x")
                assert await call.read() == b"x"
                await call.done_writing()
            else:
                assert (
                    await channel.unary_unary(method)(b"x", metadata=metadata, timeout=10) == b"x"
                )
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


def test_every_method_of_every_service_has_a_row() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in SERVED
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods | {FRAMES} == set(RULES)


def test_a_gateway_changes_nothing_by_itself() -> None:
    changing = {method for method, rule in RULES.items() if rule == CHANGE}
    looking = {
        method
        for method, rule in RULES.items()
        if ".Admin/" in method and Role.GATEWAY in rule.roles
    }
    admin = {
        f"/catenary.v1.Admin/{each.name}"
        for each in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods
    }
    assert changing | looking == admin
    assert not changing & looking
    assert all(Role.AGENT not in RULES[each].roles | RULES[each].with_key for each in admin)


@pytest.mark.parametrize(
    ("role", "method", "expected"),
    [
        ("gateway", "/catenary.v1.Scheduler/GetControlEndpoint", "OK"),
        ("agent", "/catenary.v1.Scheduler/GetControlEndpoint", "OK"),
        ("operator", "/catenary.v1.Scheduler/GetControlEndpoint", "PERMISSION_DENIED"),
        ("scheduler", "/catenary.v1.Scheduler/GetControlEndpoint", "PERMISSION_DENIED"),
        ("gateway", STATUS, "OK"),
        ("operator", STATUS, "OK"),
        ("agent", STATUS, "PERMISSION_DENIED"),
        ("operator", DRAIN, "OK"),
        ("gateway", DRAIN, "PERMISSION_DENIED"),
        ("agent", DRAIN, "PERMISSION_DENIED"),
        ("redis", DRAIN, "PERMISSION_DENIED"),
        ("operator", UNKNOWN, "PERMISSION_DENIED"),
        ("agent", "/grpc.health.v1.Health/Check", "OK"),
    ],
)
async def test_the_table_is_what_servers_obey(
    certificates: Certificates, role: str, method: str, expected: str
) -> None:
    async with serving(certificates) as port:
        assert await outcome(port, certificates.client(role, f"{role}-0"), method) == expected


async def test_an_operators_key_lets_a_gateway_change_the_cluster(
    certificates: Certificates, keys: tuple[ApiKeys, dict[str, str]]
) -> None:
    known, secrets = keys
    gateway, agent = certificates.client("gateway", "g"), certificates.client("agent", "a")
    async with serving(certificates, known) as port:
        assert await outcome(port, gateway, DRAIN, secrets["admin"]) == "OK"
        assert await outcome(port, gateway, DRAIN, secrets["view"]) == "PERMISSION_DENIED"
        assert await outcome(port, gateway, DRAIN, secrets["infer"]) == "PERMISSION_DENIED"
        assert await outcome(port, gateway, DRAIN, "ctn_invented") == "PERMISSION_DENIED"
        assert await outcome(port, gateway, DRAIN) == "PERMISSION_DENIED"
        assert await outcome(port, gateway, STATUS) == "OK"
        # A key makes an operator of a gateway, and of nobody else.
        assert await outcome(port, agent, DRAIN, secrets["admin"]) == "PERMISSION_DENIED"
        operator = certificates.client("operator", "alice")
        assert await outcome(port, operator, DRAIN) == "OK"


async def test_members_of_another_cluster_are_strangers(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Also if the same authority signed them."""
    other = certificates.client("gateway", "g")
    security = certificates.server("scheduler", "scheduler-0")
    server = create_server(security, authorizer=RoleAuthorizer("other", insecure=False))
    server.add_generic_rpc_handlers((Answers(),))
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    try:
        assert await outcome(port, other, STATUS) == "PERMISSION_DENIED"
    finally:
        await server.stop(0)
    foreign = Certificates(tmp_path / "foreign", "other")
    async with serving(certificates) as port:
        assert await outcome(port, foreign.client("operator", "eve"), DRAIN) == "UNAVAILABLE"


async def test_a_client_demands_the_role_of_the_server(certificates: Certificates) -> None:
    gateway = certificates.client("gateway", "g")
    async with serving(certificates) as port:
        assert await outcome(port, gateway, STATUS, role=Role.SCHEDULER) == "OK"
        assert await outcome(port, gateway, STATUS, role=Role.AGENT) == "UNAVAILABLE"


async def test_without_tls_only_keys_say_who_may_change_something(
    certificates: Certificates, keys: tuple[ApiKeys, dict[str, str]]
) -> None:
    known, secrets = keys
    security = ServerSecurity(insecure=True)
    for keys_used, expected in ((known, "PERMISSION_DENIED"), (None, "OK")):
        server = create_server(
            security, authorizer=RoleAuthorizer("main", keys_used, insecure=True)
        )
        server.add_generic_rpc_handlers((Answers(),))
        port = bind(server, "127.0.0.1", 0, security)
        await server.start()
        client = ClientSecurity(insecure=True)
        try:
            assert await outcome(port, client, DRAIN) == expected
            assert await outcome(port, client, DRAIN, secrets["admin"]) == "OK"
            assert await outcome(port, client, STATUS) == "OK"
        finally:
            await server.stop(0)
