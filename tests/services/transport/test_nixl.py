"""Frames over NIXL: when it is chosen, what peers may say, and peers that die."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_services.addresses import host_port
from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost, Unavailable
from catenary_services.security.identity import Role
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.interface import EndpointAddress, FrameSender, Link
from catenary_services.transport.nixl import lent_ring, nixl_thread
from catenary_services.transport.nixl.nixl import NixlEndpoint
from catenary_services.transport.nixl.ring import RingDescription
from catenary_services.transport.settings import TransportSettings
from shared_helpers.peers import peer_of
from shared_helpers.waiting import until
from tests.services.transport.peers import MIB, NIXL, Inbox, Spawn

needs_nixl = NIXL.marks[0]
TRUSTED = TransportSettings(("nixl", "tcp"), trusted_network=True)


class Hubs:
    """Hubs with directories of each other, closed at the end."""

    def __init__(self) -> None:
        self.made: dict[str, TransportHub] = {}

    async def add(
        self, peer_id: str, chosen: TransportSettings, inbox: Inbox | None = None
    ) -> TransportHub:
        hub = self.made[peer_id] = TransportHub(peer_id, chosen)
        await hub.start(inbox or Inbox())
        for each in self.made.values():
            each.update_directory([peer_of(name, hub) for name, hub in self.made.items()])
        return hub


@pytest.fixture
async def hubs() -> AsyncIterator[Hubs]:
    made = Hubs()
    yield made
    for hub in made.made.values():
        await hub.close()


async def send(link: Link, nbytes: int, header: bytes = b"h", timeout_s: float = 10.0) -> None:
    slot = await link.export(nbytes, timeout_s)
    slot.view[:] = bytes(nbytes)
    await link.push(slot, header, timeout_s)


# ---- when it is chosen ----


def test_it_is_refused_where_nobody_says_that_the_network_is_trusted() -> None:
    with pytest.raises(InvalidInput, match="trusted_network"):
        TransportHub("a", TransportSettings(("nixl", "tcp")))


async def test_without_the_library_a_process_starts_with_its_other_transports(
    hubs: Hubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_thread, "_PACKAGES", ("no_such_package",))
    inbox = Inbox()
    a, b = await hubs.add("a", TRUSTED), await hubs.add("b", TRUSTED, inbox)
    assert [each.transport for each in b.addresses] == ["tcp"]
    await send(await a.link_to("b", 10), 20_000)
    assert (await inbox.next()).capabilities.transport == "tcp"


async def test_without_the_library_a_process_that_has_nothing_else_says_so(
    hubs: Hubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_thread, "_PACKAGES", ("no_such_package",))
    with pytest.raises(Unavailable, match="not installed"):
        await hubs.add("a", replace(TRUSTED, enabled=("nixl",)))


@needs_nixl
async def test_it_is_used_between_two_that_have_it_and_by_nobody_else(hubs: Hubs) -> None:
    inbox = Inbox()
    a = await hubs.add("a", TRUSTED)
    await hubs.add("b", TRUSTED, inbox)
    await hubs.add("c", TransportSettings(("tcp",)))
    link = await a.link_to("b", 30)
    assert link.capabilities.transport == "nixl"
    await send(link, MIB)
    assert len((await inbox.next()).payload) == MIB
    assert (await a.link_to("c", 30)).capabilities.transport == "tcp"


@needs_nixl
async def test_a_peer_without_memory_to_lend_is_reached_over_tcp(hubs: Hubs) -> None:
    await hubs.add("b", replace(TRUSTED, receive_bytes=4 * MIB))  # two rings
    chosen = []
    for name in ("x", "y", "z"):
        hub = await hubs.add(name, TRUSTED)
        chosen.append((await hub.link_to("b", 30)).capabilities.transport)
    assert chosen == ["nixl", "nixl", "tcp"]


@needs_nixl
async def test_a_peer_with_another_version_is_reached_over_tcp(
    hubs: Hubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await hubs.add("a", TRUSTED)
    monkeypatch.setattr(nixl_thread.importlib.metadata, "version", lambda _: "0.0.1")
    await hubs.add("b", TRUSTED)
    assert (await a.link_to("b", 30)).capabilities.transport == "tcp"


@needs_nixl
async def test_with_tls_frames_say_who_wrote_them(hubs: Hubs, tmp_path: Path) -> None:
    from tests.support.certificates import Certificates

    certificates = Certificates(tmp_path / "certs")
    inbox = Inbox()

    def secured(name: str) -> TransportSettings:
        return replace(TRUSTED, security=certificates.transport("agent", name))

    a = await hubs.add("a", secured("a"))
    await hubs.add("b", secured("b"), inbox)
    link = await a.link_to("b", 30)
    await send(link, MIB)
    frame = await inbox.next()
    assert frame.capabilities.transport == "nixl"
    assert frame.sender == FrameSender("a", Role.AGENT)


# ---- memory ----


@needs_nixl
async def test_the_ring_of_who_is_gone_is_lent_again_but_not_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox = Inbox()
    receiver = NixlEndpoint("b", replace(TRUSTED, receive_bytes=2 * MIB, ring_bytes=2 * MIB))
    sender = NixlEndpoint("a", TRUSTED)
    await receiver.start(inbox)
    await sender.start(Inbox())
    try:
        for _ in range(2):  # half of the memory each
            await send(await sender.connect(receiver.address, 30), 100_000)
        held = [await inbox.next() for _ in range(2)]
        monkeypatch.setattr(lent_ring, "LINGER_S", 0.05)
        for link in tuple(sender._links):
            await link.close()
        await until(lambda: len(receiver._retired) == 2)
        held.pop().release()
        await until(lambda: len(receiver._retired) == 1)
        assert receiver._ring_pool.reserved == MIB  # a frame of it is held
        assert bytes(held[0].payload) == bytes(100_000)
        held.pop().release()
        await until(lambda: receiver._ring_pool.reserved == 0)
        link = await sender.connect(receiver.address, 30)
        await send(link, 100_000)
        (await inbox.next()).release()
    finally:
        await sender.close()
        await receiver.close()


# ---- peers that die ----

SENDER = """
import asyncio, sys
from catenary_services.transport.interface import EndpointAddress
from catenary_services.transport.nixl.nixl import NixlEndpoint
from catenary_services.transport.settings import TransportSettings
async def main():
    endpoint = NixlEndpoint("foreign", TransportSettings(trusted_network=True))
    await endpoint.start(lambda frame: frame.release())
    link = await endpoint.connect(EndpointAddress("nixl", sys.argv[1], ""), 20)
    while True:
        await link.push(await link.export(30 << 20, 20), b"", 20)
asyncio.run(main())
"""
WAYS = pytest.mark.parametrize("ways", ["all", "tcp"])
"""The ways by which the library may write: with `tcp` the dying side takes part."""


@needs_nixl
@WAYS
async def test_a_receiver_killed_in_the_middle_gives_all_memory_back(
    spawn: Spawn, tmp_path: Path, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", ways)
    monkeypatch.setattr(nixl_thread, "PIECE_BYTES", 16 << 10)  # so that it takes its time
    sender = NixlEndpoint("a", TRUSTED)
    await sender.start(Inbox())
    try:
        for _ in range(2):
            foreign = await spawn("nixl", tmp_path)
            link = await sender.connect(foreign.address, 30)
            await send(link, 20_000)
            assert int(await foreign.received()) == 20_000
            frames = [
                asyncio.create_task(send(link, nbytes, timeout_s=20))
                for nbytes in (30 * MIB, 200 * MIB)  # written, and sent behind it
            ]
            await until(lambda link=link, frames=frames: link._write or frames[0].done())
            await foreign.kill()
            ends = await asyncio.gather(*frames, return_exceptions=True)
            assert isinstance(ends[1], PartitionLost)
            assert link.closed
            await until(lambda: not sender._nixl._writes)
            await until(lambda: sender._send_pool.reserved == 0)
    finally:
        await sender.close()


@needs_nixl
@WAYS
async def test_a_sender_killed_in_the_middle_leaves_its_ring(
    ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", ways)
    monkeypatch.setattr(lent_ring, "LINGER_S", 0.05)
    frames = 0

    def take(frame: object) -> None:
        nonlocal frames
        frames += 1
        frame.release()  # type: ignore[attr-defined]

    receiver = NixlEndpoint("b", TRUSTED)
    await receiver.start(take)
    try:
        for count in (1, 4):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                SENDER,
                receiver.address.address,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            before = frames
            await until(lambda before=before, count=count: frames >= before + count)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await until(lambda: receiver._ring_pool.reserved == 0)
    finally:
        await receiver.close()


# ---- peers that say anything ----

numbers = st.one_of(st.integers(0, 600), st.integers(0, 2**64 - 1))
messages = st.builds(
    lambda kind, header, payload, argument: (
        encode_prefix(MessagePrefix(kind, len(header), payload, argument)) + header
    ),
    st.sampled_from([MessageKind.RING, MessageKind.SLOT, MessageKind.RELEASE, MessageKind.FRAME]),
    st.binary(max_size=100),
    st.one_of(st.integers(0, 3 * MIB), st.integers(0, 2**64 - 1)),
    numbers,
)
HELLO = encode_prefix(MessagePrefix(MessageKind.HELLO, 4)) + b"liar"
WELCOME = encode_prefix(MessagePrefix(MessageKind.WELCOME, 1)) + b"b"


@dataclass
class Stand:
    """Two endpoints of this process, and a peer that says whatever a test has it say."""

    runner: asyncio.Runner
    endpoint: NixlEndpoint
    inbox: Inbox
    other: NixlEndpoint
    said: bytes = b""
    """What the peer says after a sender's request for a ring."""
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    names: Iterator[int] = field(default_factory=itertools.count)

    async def as_sender(self, data: bytes) -> None:
        host, _, port = self.endpoint.address.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionError):
            writer.write(HELLO + data)
            writer.write_eof()
            async with asyncio.timeout(20):
                while await reader.read(65536):
                    pass
        writer.close()

    async def as_receiver(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        address = host_port(*server.sockets[0].getsockname()[:2])
        try:
            with suppress(CatenaryError):
                link = await self.endpoint.connect(EndpointAddress("nixl", address, ""), 2)
                await send(link, 20_000, timeout_s=0.2)
        finally:
            server.close()
            for writer in self.writers:
                writer.close()
            self.writers.clear()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(32 + 1)
            writer.write(WELCOME)
            await reader.readexactly(32)
            writer.write(self.said)

    async def true_description(self) -> RingDescription:
        """Returns what the other endpoint says of its ring to a sender."""
        host, _, port = self.other.address.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(HELLO + encode_prefix(MessagePrefix(MessageKind.RING)))
        await reader.readexactly(len(WELCOME))
        prefix = await reader.readexactly(32)
        description = await reader.readexactly(int.from_bytes(prefix[8:12], "little"))
        self.writers.add(writer)  # the ring is lent while the connection is open
        return RingDescription.decode(description)

    async def works(self) -> None:
        """Sends a frame from the other endpoint to the attacked one, and back."""
        while not self.inbox.frames.empty():
            self.inbox.frames.get_nowait().release()
        for source, target in ((self.other, self.endpoint), (self.endpoint, self.other)):
            link = await source.connect(target.address, 30)
            name = f"honest {next(self.names)}".encode()
            await send(link, 70_000, name)
            while (frame := await self.inbox.next()).header != name:
                frame.release()
            frame.release()
            await link.close()


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    monkeypatch.setattr(lent_ring, "LINGER_S", 0.01)
    with asyncio.Runner() as runner:
        inbox = Inbox()
        chosen = replace(TRUSTED, ring_bytes=2 * MIB, max_frame_bytes=4 * MIB)

        async def opened() -> tuple[NixlEndpoint, NixlEndpoint]:
            made = NixlEndpoint("b", chosen), NixlEndpoint("c", chosen)
            for endpoint in made:
                await endpoint.start(inbox)
            return made

        first, second = runner.run(opened())
        yield Stand(runner, first, inbox, second)
        runner.run(first.close())
        runner.run(second.close())


def attacked(examples: int) -> settings:
    return settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))


@needs_nixl
def test_whatever_a_sender_says_harms_nobody(stand: Stand) -> None:
    @attacked(60)
    @given(st.lists(messages, max_size=6), st.binary(max_size=40))
    def attack(said: list[bytes], rest: bytes) -> None:
        stand.runner.run(stand.as_sender(b"".join(said) + rest))

    attack()
    ring = encode_prefix(MessagePrefix(MessageKind.RING))
    slot = encode_prefix(MessagePrefix(MessageKind.SLOT, 0, 100, 3))
    for said in (ring + ring, ring + slot + slot, slot):
        stand.runner.run(stand.as_sender(said))
    stand.runner.run(stand.works())


@needs_nixl
def test_whatever_a_receiver_says_harms_nobody(stand: Stand) -> None:
    """Its description of a ring is true, false in one place, or any bytes."""
    true = stand.runner.run(stand.true_description())
    false = st.one_of(
        st.builds(lambda at: replace(true, address=at), st.integers(1, 2**63)),
        st.builds(lambda by: replace(true, address=true.address + by), st.integers(0, 4 * MIB)),
        st.builds(lambda slots: replace(true, slots=slots), st.integers(1, 20_000)),
        st.builds(lambda size: replace(true, slot_bytes=size), st.integers(1, 2**32 - 1)),
        st.builds(lambda name: replace(true, name=name), st.text(min_size=1, max_size=80)),
        st.builds(lambda word: replace(true, version=word), st.text(min_size=1, max_size=80)),
    ).map(RingDescription.encode)

    def changed(at: int, to: bytes) -> bytes:
        data = true.encode()
        return data[: at % len(data)] + to + data[at % len(data) + len(to) :]

    described = st.one_of(
        st.just(true.encode()),
        false,
        st.binary(max_size=600),
        st.builds(changed, st.integers(0, 1000), st.binary(min_size=1, max_size=8)),
    ).map(lambda data: encode_prefix(MessagePrefix(MessageKind.RING, len(data))) + data)

    @attacked(40)
    @given(described, st.lists(messages, max_size=4))
    def attack(ring: bytes, said: list[bytes]) -> None:
        stand.said = ring + b"".join(said)
        stand.runner.run(stand.as_receiver())

    attack()
    stand.runner.run(stand.works())
