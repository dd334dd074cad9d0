from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
import structlog
import trustme

from catenary_services.errors import InvalidInput
from catenary_services.grpc.grpc_kit import bind, create_server, open_channel
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.settings import ProcessSettings


@dataclass(frozen=True)
class Party:
    """Certificate, key and trusted authority of one side, as files."""

    cert: Path
    key: Path
    ca: Path

    def settings(self, **changes: object) -> ProcessSettings:
        files = {"tls_cert_file": self.cert, "tls_key_file": self.key, "tls_ca_file": self.ca}
        return ProcessSettings(**{**files, **changes})  # type: ignore[arg-type]


def party(folder: Path, host: str = "127.0.0.1") -> Party:
    folder.mkdir()
    authority = trustme.CA()
    pair = authority.issue_cert(host, "localhost")
    made = Party(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    pair.private_key_pem.write_to_path(made.key)
    for number, blob in enumerate(pair.cert_chain_pems):
        blob.write_to_path(made.cert, append=number > 0)
    authority.cert_pem.write_to_path(made.ca)
    return made


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Party:
    return party(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Party:
    return party(tmp_path_factory.mktemp("tls") / "stranger")


class Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    async def answer(self, request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return request


@asynccontextmanager
async def grpc_server(security: ServerSecurity) -> AsyncIterator[int]:
    server = create_server(security)
    server.add_generic_rpc_handlers([Echo()])
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    yield port
    await server.stop(None)


async def call(port: int, security: ClientSecurity) -> bytes:
    async with open_channel(f"127.0.0.1:{port}", security) as channel:
        return await channel.unary_unary("/a/b")(b"hello", timeout=5)


@asynccontextmanager
async def socket_server(security: ServerSecurity) -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await reader.readexactly(5))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=security.ssl_context())
    yield int(server.sockets[0].getsockname()[1])
    server.close()


async def exchange(port: int, security: ClientSecurity) -> bytes:
    context = security.ssl_context()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="127.0.0.1" if context else None
    )
    try:
        writer.write(b"hello")
        return await asyncio.wait_for(reader.readexactly(5), 30)
    finally:
        writer.close()


async def test_mutual_tls_connects_members(ours: Party) -> None:
    settings = ours.settings()
    server, client = ServerSecurity.from_settings(settings), ClientSecurity.from_settings(settings)
    async with grpc_server(server) as port:
        assert await call(port, client) == b"hello"
    async with socket_server(server) as port:
        assert await exchange(port, client) == b"hello"


async def test_mutual_tls_refuses_clients_without_a_certificate(ours: Party) -> None:
    server = ServerSecurity.from_settings(ours.settings())
    nameless = ClientSecurity(ca_file=ours.ca)
    async with grpc_server(server) as port:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(port, nameless)
    async with socket_server(server) as port:
        with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
            await exchange(port, nameless)


async def test_mutual_tls_refuses_certificates_of_strangers(ours: Party, stranger: Party) -> None:
    server = ServerSecurity.from_settings(ours.settings())
    impostor = ClientSecurity(ca_file=ours.ca, cert_file=stranger.cert, key_file=stranger.key)
    async with grpc_server(server) as port:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(port, impostor)
    async with socket_server(server) as port:
        with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
            await exchange(port, impostor)


async def test_client_refuses_servers_of_strangers(ours: Party, stranger: Party) -> None:
    server = ServerSecurity.from_settings(stranger.settings(), mutual=False)
    client = ClientSecurity.from_settings(ours.settings())
    async with grpc_server(server) as port:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(port, client)
    async with socket_server(server) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await exchange(port, client)


async def test_client_refuses_a_certificate_for_another_host(ours: Party, tmp_path: Path) -> None:
    elsewhere = party(tmp_path / "elsewhere", "example.org")
    server = ServerSecurity.from_settings(elsewhere.settings(), mutual=False)
    client = ClientSecurity(ca_file=elsewhere.ca)
    async with socket_server(server) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await exchange(port, client)


async def test_public_endpoint_takes_clients_without_a_certificate(ours: Party) -> None:
    server = ServerSecurity.from_settings(ours.settings(), mutual=False)
    async with grpc_server(server) as port:
        assert await call(port, ClientSecurity(ca_file=ours.ca)) == b"hello"
        with pytest.raises(grpc.aio.AioRpcError):
            await call(port, ClientSecurity(insecure=True))


async def test_insecure_works_only_by_saying_so_and_warns() -> None:
    with structlog.testing.capture_logs() as lines:
        server = ServerSecurity.from_settings(ProcessSettings(insecure=True))
        client = ClientSecurity.from_settings(ProcessSettings(insecure=True))
    assert [line["log_level"] for line in lines] == ["warning", "warning"]
    assert server.ssl_context() is client.ssl_context() is None
    async with grpc_server(server) as port:
        assert await call(port, client) == b"hello"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tls_cert_file": None, "tls_key_file": None, "tls_ca_file": None}, "tls_cert_file"),
        ({"tls_key_file": None}, "tls_key_file"),
        ({"tls_ca_file": None}, "tls_ca_file"),
        ({"insecure": True}, "insecure"),
    ],
)
def test_half_a_configuration_is_refused(
    ours: Party, changes: dict[str, object], field: str
) -> None:
    settings = ours.settings(**changes)
    for make in (ServerSecurity.from_settings, ClientSecurity.from_settings):
        with pytest.raises(InvalidInput) as caught:
            make(settings)
        assert caught.value.field == field


def test_missing_file_stops_the_start_and_is_named(ours: Party, tmp_path: Path) -> None:
    server = ServerSecurity.from_settings(ours.settings(tls_cert_file=tmp_path / "none.pem"))
    with pytest.raises(InvalidInput, match="tls_cert_file"):
        create_server(server)
    with pytest.raises(InvalidInput, match="tls_cert_file"):
        server.ssl_context()


def test_key_that_does_not_fit_is_refused(ours: Party, stranger: Party) -> None:
    server = ServerSecurity.from_settings(ours.settings(tls_key_file=stranger.key))
    with pytest.raises(InvalidInput, match="tls_cert_file"):
        server.ssl_context()
    with pytest.raises(InvalidInput, match="tls_cert_file"):
        create_server(server)
