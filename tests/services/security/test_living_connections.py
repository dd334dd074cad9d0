"""Connections end when their peers would not be let in again: real handshakes, real files."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from cryptography.hazmat.primitives import serialization

from catenary_services.errors import InvalidInput, Unauthenticated
from catenary_services.security import living_connections, rotation
from catenary_services.security.authority import CertificateAuthority
from catenary_services.security.identity import Identity, Role
from catenary_services.security.living_connections import (
    LivingConnections,
    revocation_lists,
    revoked_by,
)
from catenary_services.security.own_certificate import OwnCertificate
from catenary_services.security.rotation import watched_files
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.security.x509 import (
    new_key,
    read_certificates,
    read_key,
    signed,
    subject_names,
    write_certificates,
    write_key,
)
from catenary_services.settings import ProcessSettings
from catenary_services.telemetry.metrics import Metrics
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.tcp.tcp import TcpEndpoint
from tests.support.certificates import Certificates

SOON_S = 30.0


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certs")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "POLL_S", 0.05)


class Server:
    """A server that notes its connections, in a process that watches its files."""

    def __init__(self, certificates: Certificates) -> None:
        self.security: ServerSecurity = certificates.server("scheduler", "scheduler-0")
        settings = certificates.settings("scheduler", "scheduler-0")
        self._own = OwnCertificate(
            ProcessSettings(**settings),  # type: ignore[arg-type]
            Role.SCHEDULER,
            "scheduler-0",
        )

    async def __aenter__(self) -> Server:
        self._own.start(Metrics())
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, ssl=self.security.ssl_context()
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._own.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.security.register(writer.transport)
            while data := await reader.read(100):
                writer.write(data)
        except (OSError, Unauthenticated):
            pass
        finally:
            writer.close()

    async def connection(self, client: ClientSecurity) -> Connection:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=client.ssl_context(), server_hostname="localhost"
        )
        return Connection(reader, writer)


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def echoes(self) -> bool:
        """Returns whether the server still answers."""
        try:
            self._writer.write(b"x")
            return await asyncio.wait_for(self._reader.read(1), SOON_S) == b"x"
        except OSError:
            return False

    async def ended(self) -> bool:
        """Waits until the server has ended the connection."""
        try:
            return await asyncio.wait_for(self._reader.read(1), SOON_S) == b""
        except OSError:
            return True


@pytest.fixture
async def server(certificates: Certificates) -> AsyncIterator[Server]:
    certificates.files("scheduler", "scheduler-0")
    async with Server(certificates) as made:
        yield made


async def test_who_is_revoked_is_cut_off_and_stays_out_while_others_go_on(
    server: Server, certificates: Certificates, tmp_path: Path
) -> None:
    stolen = kept(certificates, "agent", "stolen", tmp_path / "stolen")
    bad = await server.connection(stolen)
    good = await server.connection(certificates.client("agent", "good"))
    assert await bad.echoes()
    assert await good.echoes()
    assert certificates.authority.revoke(Identity.of("main", Role.AGENT, "stolen")) == 1
    assert await bad.ended()
    assert await good.echoes()
    assert not await (await server.connection(stolen)).echoes()
    # The same name gets a new certificate, which is good.
    assert await (await server.connection(certificates.client("agent", "stolen"))).echoes()


def test_connections_end_on_the_event_loop_of_processes_too(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Transports of uvloop take no weak references and are of no class of asyncio's."""
    certificates.files("scheduler", "scheduler-0")

    async def on_it() -> None:
        async with Server(certificates) as server:
            connection = await server.connection(
                kept(certificates, "agent", "stolen", tmp_path / "stolen")
            )
            assert await connection.echoes()
            certificates.authority.revoke(Identity.of("main", Role.AGENT, "stolen"))
            assert await connection.ended()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(on_it())


async def test_connections_of_a_dropped_authority_end_and_those_of_the_next_go_on(
    server: Server, certificates: Certificates, tmp_path: Path
) -> None:
    certificates.files("agent", "a")
    old = await server.connection(kept(certificates, "agent", "a", tmp_path / "old"))
    authority = certificates.authority
    authority.add_next()
    assert await old.echoes()
    authority.use_next()
    assert await old.echoes()
    new = await server.connection(certificates.client("agent", "a"))
    authority.drop_others()
    assert await old.ended()
    assert await new.echoes()


async def test_a_connection_ends_with_the_certificate_it_was_made_by(
    server: Server, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living_connections, "SWEEP_S", 0.05)
    short = await server.connection(short_lived(certificates, dt.timedelta(seconds=4)))
    long = await server.connection(certificates.client("agent", "long"))
    assert await short.echoes()
    assert await short.ended()
    assert await long.echoes()


async def test_frames_of_an_agent_that_is_revoked_end_at_both_ends(
    certificates: Certificates, server: Server
) -> None:
    """The link is noted where it is made as well as where it is accepted."""
    ends = {
        name: TcpEndpoint(
            name,
            TransportSettings(host="127.0.0.1", security=certificates.transport("agent", name)),
        )
        for name in ("a", "b")
    }
    for end in ends.values():
        await end.start(lambda frame: frame.release())
    link = await ends["a"].connect(ends["b"].address, SOON_S, "b")
    files = {name: certificates.server("agent", name).files for name in ends}
    assert [len(files[name]._living) for name in ("a", "b")] == [1, 1]
    certificates.authority.revoke(Identity.of("main", Role.AGENT, "b"))
    files["a"]._living.sweep(files["a"].current().trust)
    async with asyncio.timeout(SOON_S):
        while not link.closed:
            await asyncio.sleep(0.01)
    for end in ends.values():
        await end.close()


async def test_what_is_forgotten_elsewhere_is_not_kept_here(
    server: Server, certificates: Certificates
) -> None:
    connection = await server.connection(certificates.client("agent", "a"))
    assert await connection.echoes()
    living = server.security.files._living
    assert len(living) == 1
    connection._writer.close()
    async with asyncio.timeout(SOON_S):
        while len(living):
            living.sweep(server.security.files.current().trust)
            await asyncio.sleep(0.01)


class Wire(asyncio.Transport):
    """A transport that only knows whether it was closed."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


async def test_a_change_of_the_authority_ends_a_few_connections_at_a_time(
    certificates: Certificates,
) -> None:
    files = watched_files(*certificates.files("scheduler", "scheduler-0").values())
    shown = read_certificates(certificates.files("agent", "a")["cert_file"])[0]
    der = shown.public_bytes(serialization.Encoding.DER)
    living, wires = LivingConnections(), [Wire() for _ in range(12)]
    for wire in wires:
        living.register(wire, der, files.current().trust)
    authority = certificates.authority
    authority.add_next()
    authority.use_next()
    living.sweep(files.current().trust)
    assert not any(wire.aborted for wire in wires)
    authority.drop_others()
    ended = []
    while len(living):
        living.sweep(files.current().trust)
        ended.append(sum(wire.aborted for wire in wires))
    assert ended[0] == 3
    assert len(ended) > 4
    assert all(wire.aborted for wire in wires)


def test_lists_of_the_revoked_outlive_a_change_of_the_authority(certificates: Certificates) -> None:
    authority = certificates.authority
    for name in ("a", "b"):
        certificates.files("agent", name)
        authority.revoke(Identity.of("main", Role.AGENT, name))
    assert revoked(certificates) == 2
    authority.add_next()
    authority.use_next()
    assert revoked(certificates) == 2
    authority.drop_others()
    assert revoked(certificates) == 0  # with their authority they are refused anyway


def test_certificates_whose_keys_lie_elsewhere_can_be_revoked(certificates: Certificates) -> None:
    identity = Identity.of("main", Role.AGENT, "far")
    for _ in range(3):
        certificates.authority.sign(identity, new_key().public_key())
    assert certificates.authority.revoke(identity) == 3
    with pytest.raises(InvalidInput, match="has no certificate of this authority"):
        certificates.authority.revoke(identity)


def test_a_list_that_another_authority_signed_counts_for_nothing(
    certificates: Certificates, tmp_path: Path
) -> None:
    other = Certificates(tmp_path / "other")
    other.files("agent", "a")
    other.authority.revoke(Identity.of("main", Role.AGENT, "a"))
    lists = revocation_lists(other.ca_file.read_bytes())
    assert len(lists) == 1
    assert revoked_by(read_certificates(other.ca_file), lists)
    assert not revoked_by(read_certificates(certificates.ca_file), lists)


@pytest.mark.parametrize("cut", [30, 200])
def test_a_broken_list_changes_nothing(certificates: Certificates, cut: int) -> None:
    files = certificates.server("scheduler", "scheduler-0").files
    certificates.files("agent", "a")
    certificates.authority.revoke(Identity.of("main", Role.AGENT, "a"))
    before = files.current()
    assert len(before.trust.revoked) == 1
    certificates.ca_file.write_bytes(certificates.ca_file.read_bytes()[:-cut])
    assert files.current() is before


def revoked(certificates: Certificates) -> int:
    pem = certificates.ca_file.read_bytes()
    return len(revoked_by(read_certificates(certificates.ca_file), revocation_lists(pem)))


def kept(certificates: Certificates, role: str, name: str, folder: Path) -> ClientSecurity:
    """Returns a client that goes on with copies of what the files hold now."""
    folder.mkdir()
    copies = {}
    for field, file in certificates.files(role, name).items():
        copies[field] = folder / file.name
        copies[field].write_bytes(file.read_bytes())
    return ClientSecurity(**copies)


def short_lived(certificates: Certificates, life: dt.timedelta) -> ClientSecurity:
    folder = certificates.folder
    signer = read_certificates(certificates.ca_file)[0], read_key(folder / "ca-key.pem")
    identity, key = Identity.of("main", Role.AGENT, "short"), new_key()
    made = signed(identity, subject_names(identity, ()), key.public_key(), signer, life)
    write_key(folder / "short-key.pem", key)
    write_certificates(folder / "short.pem", [made])
    return ClientSecurity(
        ca_file=certificates.ca_file,
        cert_file=folder / "short.pem",
        key_file=folder / "short-key.pem",
    )


def test_so_many_at_most_are_revoked(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catenary_services.security.authority.MOST_REVOKED", 2)
    authority: CertificateAuthority = certificates.authority
    for name in ("a", "b", "c"):
        certificates.files("agent", name)
    authority.revoke(Identity.of("main", Role.AGENT, "a"))
    authority.revoke(Identity.of("main", Role.AGENT, "b"))
    with pytest.raises(InvalidInput, match="change the authority"):
        authority.revoke(Identity.of("main", Role.AGENT, "c"))
