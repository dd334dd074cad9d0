"""Frames come from whom the certificate names, and only from peers of the directory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from catenary_services.errors import PartitionLost
from catenary_services.security.identity import Role
from catenary_services.transport import known_senders
from catenary_services.transport.exchange import MemoryFrame
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.interface import Capabilities, EndpointAddress, FrameSender
from catenary_services.transport.known_senders import KnownSenders
from catenary_services.transport.settings import TransportSettings, host_id
from catenary_services.transport.shared_memory.shm import ShmEndpoint
from shared_helpers.peers import peer_of
from tests.services.transport.peers import NIXL, Inbox
from tests.support.certificates import Certificates

TLS = ["tcp", "grpc", NIXL]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certs")


class Peers:
    """Hubs with certificates, closed at the end."""

    def __init__(self, certificates: Certificates, transport: str) -> None:
        self.certificates = certificates
        self.transport = transport
        self.hubs: list[TransportHub] = []
        self.refused: list[str] = []

    async def hub(
        self, peer_id: str, inbox: Inbox | None = None, *, role: str = "agent", name: str = ""
    ) -> TransportHub:
        """Starts a hub as `peer_id` with a certificate of `name`."""
        security = self.certificates.transport(role, name or peer_id)
        settings = TransportSettings(
            enabled=(self.transport,), security=security, trusted_network=True
        )
        made = TransportHub(peer_id, settings, self.refused.append)
        await made.start(inbox or Inbox())
        self.hubs.append(made)
        return made


@pytest.fixture(params=TLS)
async def peers(request: pytest.FixtureRequest, certificates: Certificates) -> AsyncIterator[Peers]:
    made = Peers(certificates, str(request.param))
    yield made
    for hub in made.hubs:
        await hub.close()


async def push(hub: TransportHub, peer_id: str, header: bytes = b"h") -> None:
    link = await hub.link_to(peer_id, 5)
    await link.push(await link.export(0, 5), header, 5)


async def test_frames_say_who_sent_them(peers: Peers) -> None:
    inbox = Inbox()
    a, b = await peers.hub("a", role="gateway"), await peers.hub("b", inbox)
    for hub in (a, b):
        hub.update_directory([peer_of("a", a), peer_of("b", b)])
    await push(a, "b")
    assert (await inbox.next()).sender == FrameSender("a", Role.GATEWAY)


@pytest.mark.parametrize(("role", "name"), [("agent", "x"), ("operator", "a"), ("scheduler", "a")])
async def test_who_says_to_be_another_or_is_no_peer_cannot_connect(
    peers: Peers, role: str, name: str
) -> None:
    a, b = await peers.hub("a", role=role, name=name), await peers.hub("b")
    for hub in (a, b):
        hub.update_directory([peer_of("a", a), peer_of("b", b)])
    with pytest.raises(PartitionLost):
        await push(a, "b")


@pytest.mark.parametrize(("role", "name"), [("agent", "x"), ("operator", "b"), ("scheduler", "b")])
async def test_frames_are_for_whom_the_directory_names_and_nobody_else(
    peers: Peers, role: str, name: str
) -> None:
    """Whoever listens at the address of a peer needs its certificate."""
    inbox = Inbox()
    a, b = await peers.hub("a"), await peers.hub("b", inbox, role=role, name=name)
    for hub in (a, b):
        hub.update_directory([peer_of("a", a), peer_of("b", b)])
    with pytest.raises(PartitionLost):
        await push(a, "b")
    assert inbox.frames.empty()


async def test_members_of_another_cluster_exchange_nothing(peers: Peers, tmp_path: Path) -> None:
    a = await peers.hub("a")
    peers.certificates = Certificates(tmp_path / "other", "other")
    b = await peers.hub("b")
    a.update_directory([peer_of("b", b)])
    with pytest.raises(PartitionLost):
        await push(a, "b")


async def test_frames_of_peers_in_no_directory_are_refused(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_senders, "WAIT_S", 0.05)
    inbox = Inbox()
    a, b = await peers.hub("a"), await peers.hub("b", inbox)
    a.update_directory([peer_of("b", b)])
    await push(a, "b")
    async with asyncio.timeout(30):
        while not peers.refused:
            await asyncio.sleep(0.005)
    assert peers.refused == ["unknown_sender"]
    assert inbox.frames.empty()
    link = await a.link_to("b", 5)
    async with asyncio.timeout(30):
        with suppress(PartitionLost):
            while not link.closed:  # it hears of it at its next frame
                await link.push(await link.export(0, 5), b"h", 5)
                await asyncio.sleep(0.005)
    # Once it is in the directory it is let in, over a new connection.
    b.update_directory([peer_of("a", a)])
    await push(a, "b", b"again")
    assert (await inbox.next()).header == b"again"


async def test_a_frame_that_overtakes_the_directory_waits_for_it(peers: Peers) -> None:
    inbox = Inbox()
    a, b = await peers.hub("a"), await peers.hub("b", inbox)
    a.update_directory([peer_of("b", b)])
    for header in (b"1", b"2"):
        await push(a, "b", header)
    async with asyncio.timeout(30):
        while b._senders is None or len(b._senders._waiting) < 2:
            await asyncio.sleep(0.005)
    b.update_directory([peer_of("a", a)])
    assert [(await inbox.next()).header for _ in range(2)] == [b"1", b"2"]
    assert peers.refused == []


def frame(name: str, released: list[str]) -> MemoryFrame:
    capabilities = Capabilities("tcp", same_host=False)
    view = memoryview(b"")
    return MemoryFrame(b"", view, capabilities, lambda: released.append(name), FrameSender(name))


async def test_who_was_listed_lately_may_still_send() -> None:
    """A new scheduler learns of its peers one by one."""
    taken: list[str] = []
    senders = KnownSenders(lambda each: taken.append(each.sender.name), lambda _: None)
    senders.listed(["a", "b"])
    senders.listed(["b"])
    senders.listed([])
    for name in ("a", "b"):
        senders.take(frame(name, []))
    assert taken == ["a", "b"]


async def test_no_more_frames_wait_than_a_few() -> None:
    released: list[str] = []
    senders = KnownSenders(lambda _: None, lambda _: None)
    for _ in range(300):
        senders.take(frame("stranger", released))
    assert senders.refused == len(released) == 300 - 256
    senders.close()
    assert len(released) == 300


ANOTHER_USER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
    print("nothing" if sock.recv(100) == b"" else "answered")
except OSError as error:
    print(type(error).__name__)
"""


async def test_shared_memory_is_for_processes_of_one_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    inbox = Inbox()
    endpoint = ShmEndpoint("a", TransportSettings(runtime_dir=tmp_path / "run"))
    await endpoint.start(inbox)
    path = Path(endpoint.address.address)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    try:
        # Also if whoever runs it left every door open.
        for folder in (path.parent, *path.parent.parents):
            if folder.stat().st_mode & 0o005 != 0o005:
                folder.chmod(0o755)
        path.chmod(0o666)
        found = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-S", "-c", ANOTHER_USER, str(path)],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        assert found.stdout.strip() == "nothing"
        own = ShmEndpoint("b", TransportSettings(runtime_dir=tmp_path / "run"))
        link = await own.connect(EndpointAddress("shm", str(path), host_id()), 5)
        await link.push(await link.export(0, 5), b"h", 5)
        assert (await inbox.next()).sender == FrameSender("b")
        await own.close()
    finally:
        await endpoint.close()
