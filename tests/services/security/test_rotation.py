"""Certificates and authorities are replaced under running calls, with real servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import structlog

from catenary_services.errors import InvalidInput
from catenary_services.grpc.grpc_kit import bind, create_server, open_channel
from catenary_services.security.identity import Role
from catenary_services.security.own_certificate import OwnCertificate
from catenary_services.security.rotation import watched_files
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.settings import ProcessSettings
from catenary_services.telemetry.metrics import Metrics
from tests.support.certificates import Certificates

DAY_S = 24 * 3_600


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certs")


class Server(grpc.GenericRpcHandler):
    """Echoes over gRPC and over a TLS socket."""

    def __init__(self, security: ServerSecurity) -> None:
        self.security = security

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self.echo)

    async def echo(self, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def __aenter__(self) -> Server:
        self.server = create_server(self.security)
        self.server.add_generic_rpc_handlers((self,))
        self.port = bind(self.server, "127.0.0.1", 0, self.security)
        await self.server.start()
        context = self.security.ssl_context()
        self.socket = await asyncio.start_server(_copy, "127.0.0.1", 0, ssl=context)
        self.socket_port = self.socket.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()
        await self.server.stop(0)

    async def calls(self, client: ClientSecurity) -> bool:
        """Returns whether a new channel of a client is let in."""
        async with self.channel(client) as channel:
            try:
                call = channel.stream_stream("/test/Echo")(timeout=10)
                await call.write(b"x")
                return bool(await call.read() == b"x")
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return False

    def channel(self, client: ClientSecurity) -> grpc.aio.Channel:
        return open_channel(f"127.0.0.1:{self.port}", client, role=Role.SCHEDULER)

    async def connects(self, client: ClientSecurity) -> bool:
        """Returns whether a new socket of a client is let in."""
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.socket_port, ssl=client.ssl_context(), server_hostname="localhost"
            )
            try:
                writer.write(b"x")
                return await asyncio.wait_for(reader.read(1), 30) == b"x"
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError):
            return False

    def shown(self) -> bytes:
        """Returns the certificate a new connection is shown."""
        return ssl.get_server_certificate(("127.0.0.1", self.socket_port)).encode()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(100):
            writer.write(data)
    except OSError:
        pass
    finally:
        writer.close()


def kept(files: dict[str, Path], folder: Path) -> ClientSecurity:
    """Returns a client that goes on with copies of what the files hold now."""
    folder.mkdir()
    copies = {name: folder / file.name for name, file in files.items()}
    for name, file in files.items():
        copies[name].write_bytes(file.read_bytes())
    return ClientSecurity(**copies)  # type: ignore[arg-type]


async def test_authority_and_certificates_change_under_running_calls(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Nobody is interrupted, and who still has only the old authority's word is refused."""
    files = certificates.files("gateway", "gateway-0")
    client = certificates.client("gateway", "gateway-0")
    certificates.files("scheduler", "scheduler-0")
    old = kept(files, tmp_path / "old")
    async with Server(certificates.server("scheduler", "scheduler-0")) as server:  # noqa: SIM117
        async with server.channel(client) as channel:
            call = channel.stream_stream("/test/Echo")()

            async def goes_on() -> bool:
                await call.write(b"y")
                return bool(await call.read() == b"y")

            assert await goes_on()
            for step in ("add", "use", "drop"):
                authority = certificates.authority
                {
                    "add": authority.add_next,
                    "use": authority.use_next,
                    "drop": authority.drop_others,
                }[step]()
                assert await server.calls(client), step
                assert await server.connects(client), step
                assert await goes_on(), step
                assert await server.calls(old) == (step == "add"), step
                # After "use" the old client does not know the new authority; after "drop" the
                # server does not know the old one either.
                assert await server.connects(old) == (step == "add"), step
            trusting = ClientSecurity(
                ca_file=files["ca_file"], cert_file=old.cert_file, key_file=old.key_file
            )
            assert not await server.calls(trusting)
            assert not await server.connects(trusting)
            assert await goes_on()


async def test_new_connections_are_shown_the_new_certificate(certificates: Certificates) -> None:
    files = certificates.files("scheduler", "scheduler-0")
    security = ServerSecurity(cert_file=files["cert_file"], key_file=files["key_file"])
    async with Server(security) as server:
        for renewed in (False, True):
            if renewed:
                before = files["cert_file"].read_bytes()
                certificates.files("scheduler", "scheduler-0", "localhost", "another.example.org")
                assert files["cert_file"].read_bytes() != before
            seen = await asyncio.to_thread(server.shown)
            assert seen.split() == files["cert_file"].read_bytes().split()


@pytest.mark.parametrize("wrong", ["half", "key of another", "another identity", "gone"])
async def test_files_that_are_not_good_change_nothing_and_are_reported_once(
    certificates: Certificates, wrong: str
) -> None:
    files = certificates.files("scheduler", "scheduler-0")
    client = certificates.client("gateway", "gateway-0")
    other = certificates.files("scheduler", "scheduler-1")
    async with Server(certificates.server("scheduler", "scheduler-0")) as server:
        assert await server.calls(client)
        whole = files["cert_file"].read_bytes()
        if wrong == "half":
            files["cert_file"].write_bytes(whole[: len(whole) // 2])
        elif wrong == "key of another":
            files["key_file"].write_bytes(other["key_file"].read_bytes())
        elif wrong == "another identity":
            files["key_file"].write_bytes(other["key_file"].read_bytes())
            files["cert_file"].write_bytes(other["cert_file"].read_bytes())
        else:
            files["cert_file"].unlink()
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                assert await server.calls(client)
                assert await server.connects(client)
        assert [line["event"] for line in lines] == ["certificate_kept"]
        # Whole again: taken up.
        with structlog.testing.capture_logs() as lines:
            certificates.files("scheduler", "scheduler-0", "localhost", "whole.example.org")
            assert await server.calls(client)
        assert [line["event"] for line in lines] == ["certificate_taken_up"]


async def test_files_that_were_never_good_stop_the_start(certificates: Certificates) -> None:
    files = certificates.files("scheduler", "scheduler-0")
    files["key_file"].write_text("nothing")
    with pytest.raises(InvalidInput, match="tls_key_file"):
        create_server(ServerSecurity(cert_file=files["cert_file"], key_file=files["key_file"]))


def settings(certificates: Certificates, role: str, name: str) -> ProcessSettings:
    return ProcessSettings(**certificates.settings(role, name))  # type: ignore[arg-type]


async def test_a_process_shows_how_long_its_certificate_is_good(certificates: Certificates) -> None:
    metrics = Metrics()
    own = OwnCertificate(settings(certificates, "agent", "a"), Role.AGENT, "a")
    own.start(metrics)
    left_s = metrics.registry.get_sample_value("catenary_certificate_expiry_seconds")
    assert left_s is not None
    assert 29 * DAY_S < left_s <= 30 * DAY_S
    await own.close()


@pytest.mark.parametrize(("role", "name"), [("gateway", "a"), ("agent", "b")])
def test_a_process_does_not_start_with_the_certificate_of_another(
    certificates: Certificates, role: str, name: str
) -> None:
    with pytest.raises(InvalidInput, match="names agent a of cluster main, but this is"):
        OwnCertificate(settings(certificates, "agent", "a"), Role(role), name)


def test_a_certificate_that_ends_soon_is_a_warning_once_an_hour(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificates.files("agent", "a")
    monkeypatch.setattr("catenary_services.security.rotation.WARN_SHARE_LEFT", 1.1)
    watch = watched_files(files["cert_file"], files["key_file"], files["ca_file"])
    with structlog.testing.capture_logs() as lines:
        watch.seconds_left()
        watch.seconds_left()
    assert [line["event"] for line in lines] == ["certificate_ends_soon"]
