"""Peers that send what ours never send, and peers that fall silent."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from catenary_services.errors import Overloaded, PartitionLost
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from catenary_services.transport.interface import Endpoint, EndpointAddress
from catenary_services.transport.memory import MemoryPool, MemoryShare, private_segment
from catenary_services.transport.settings import TransportSettings, host_id, socket_path
from catenary_services.transport.shared_memory.shm import ShmEndpoint
from catenary_services.transport.tcp import tcp_stream
from catenary_services.transport.tcp.tcp import TcpEndpoint
from tests.services.transport.peers import ENDPOINTS, MIB, NIXL, Inbox
from tests.support.certificates import Certificates

HELLO = encode_prefix(MessagePrefix(MessageKind.HELLO, 1)) + b"x"
WELCOME_BYTES = 33

GARBAGE = {
    "noise": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64),
    "frame before hello": encode_prefix(MessagePrefix(MessageKind.FRAME, 0, 0)),
    "second hello": HELLO + HELLO,
    "huge payload": HELLO + encode_prefix(MessagePrefix(MessageKind.FRAME, 0, 1 << 60)),
    "huge header": HELLO + encode_prefix(MessagePrefix(MessageKind.FRAME, 1 << 31, 0)),
    "credit": HELLO + encode_prefix(MessagePrefix(MessageKind.CREDIT, argument=5)),
    "slot nobody announced": HELLO + encode_prefix(MessagePrefix(MessageKind.SLOT, 0, 64, 7 << 32)),
    "segment without descriptor": HELLO
    + encode_prefix(MessagePrefix(MessageKind.SEGMENT, 0, 4096, 1)),
    "release by the sender": HELLO + encode_prefix(MessagePrefix(MessageKind.RELEASE, argument=1)),
    "other version": HELLO + struct.pack("<4sB", b"CTN1", 9) + bytes(27),
}


@pytest.fixture(params=["shm", "tcp", NIXL])
async def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Endpoint]:
    settings = TransportSettings(runtime_dir=tmp_path, ring_bytes=MIB, trusted_network=True)
    made: Endpoint = ENDPOINTS[request.param]("b", settings)
    yield made
    await made.close()


async def dial(endpoint: Endpoint) -> socket.socket:
    if endpoint.address.transport == "shm":
        sock, target = socket.socket(socket.AF_UNIX), endpoint.address.address
    else:
        host, _, port = endpoint.address.address.rpartition(":")
        sock, target = socket.socket(), (host, int(port))  # type: ignore[assignment]
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, target)
    return sock


async def end_of(sock: socket.socket) -> None:
    """Waits until the other side has closed `sock`."""
    async with asyncio.timeout(30):
        try:
            while await asyncio.get_running_loop().sock_recv(sock, 4096):
                pass
        except ConnectionError:
            pass


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_closes_its_connection_and_no_other(
    endpoint: Endpoint, garbage: bytes, tmp_path: Path
) -> None:
    inbox = Inbox()
    await endpoint.start(inbox)
    honest = await endpoint.connect(endpoint.address, 5)
    with await dial(endpoint) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, garbage)
        await end_of(sock)
    assert inbox.frames.empty()
    await honest.push(await honest.export(0, 1), b"still here", 5)
    assert (await inbox.next()).header == b"still here"


async def test_a_frame_cut_off_in_the_middle_is_not_delivered(endpoint: Endpoint) -> None:
    inbox = Inbox()
    await endpoint.start(inbox)
    with await dial(endpoint) as sock:
        cut = (
            HELLO + encode_prefix(MessagePrefix(MessageKind.FRAME, 4, 5000)) + b"head" + bytes(4000)
        )
        await asyncio.get_running_loop().sock_sendall(sock, cut)
    honest = await endpoint.connect(endpoint.address, 5)
    await honest.push(await honest.export(0, 1), b"whole", 5)
    assert (await inbox.next()).header == b"whole"
    assert inbox.frames.empty()


@pytest.mark.parametrize("at_once", [True, False])
async def test_who_sends_to_a_peer_that_has_just_gone_hears_of_it(
    at_once: bool, tmp_path: Path
) -> None:
    """The event loop has had no turn yet in which it could have told that the socket is closed."""
    loop = asyncio.get_running_loop()
    path = tmp_path / "peer.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen()
        sender = ShmEndpoint("a", TransportSettings(runtime_dir=tmp_path))
        address = EndpointAddress("shm", str(path), host_id())
        connecting = asyncio.ensure_future(sender.connect(address, 20))
        peer, _ = await loop.sock_accept(listener)
        await loop.sock_recv(peer, 4096)
        await loop.sock_sendall(peer, encode_prefix(MessagePrefix(MessageKind.WELCOME, 1)) + b"b")
        link = await connecting
        slot = await link.export(100, 5)
        peer.close()

        async def send() -> None:
            if not (at_once and link.try_push(slot, b"header")):
                await link.push(slot, b"header", 5)

        with pytest.raises(PartitionLost):
            await send()
        await sender.close()


async def test_one_byte_at_a_time_is_read_alike(endpoint: Endpoint) -> None:
    inbox = Inbox()
    await endpoint.start(inbox)
    loop = asyncio.get_running_loop()
    with await dial(endpoint) as sock:
        message = HELLO + encode_prefix(MessagePrefix(MessageKind.FRAME, 2, 3)) + b"hdabc"
        for at in range(len(message)):
            await loop.sock_sendall(sock, message[at : at + 1])
            await asyncio.sleep(0)
        frame = await inbox.next()
        assert (frame.header, bytes(frame.payload)) == (b"hd", b"abc")


@pytest.mark.parametrize("fault", ["unsealed", "shorter than announced", "not a memory file"])
async def test_memory_that_could_kill_the_reader_is_refused(tmp_path: Path, fault: str) -> None:
    endpoint = ShmEndpoint("b", TransportSettings(runtime_dir=tmp_path))
    await endpoint.start(Inbox())
    if fault == "not a memory file":
        fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    else:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    if fault == "shorter than announced":
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    announced = 8192 if fault == "shorter than announced" else 4096
    with await dial(endpoint) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, HELLO)
        segment = encode_prefix(MessagePrefix(MessageKind.SEGMENT, 0, announced, 1))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sock.sendmsg([segment], rights)
        await end_of(sock)
    os.close(fd)
    await endpoint.close()


async def test_a_silent_peer_loses_its_lease_and_the_slots_come_back(tmp_path: Path) -> None:
    settings = TransportSettings(runtime_dir=tmp_path, shm_bytes=4 * MIB, lease_s=0.2)
    a, b, inbox = ShmEndpoint("a", settings), ShmEndpoint("b", settings), Inbox()
    await a.start(Inbox())
    await b.start(inbox)
    link = await a.connect(b.address, 5)
    for _ in range(2):
        slot = await link.export(MIB, 1)
        slot.view[:4] = b"kept"
        await link.push(slot, b"", 1)
    held = [await inbox.next() for _ in range(2)]
    with pytest.raises(PartitionLost):
        await link.export(MIB, 5)
    again = await a.connect(b.address, 5)
    fresh = [await again.export(MIB, 1) for _ in range(2)]
    for slot in fresh:
        slot.view[:4] = b"new!"
    # What the slow reader holds is not touched by the new link's frames.
    assert all(bytes(frame.payload[:4]) == b"kept" for frame in held)
    await a.close()
    await b.close()


async def test_an_address_that_accepts_but_never_answers_is_lost_in_time(tmp_path: Path) -> None:
    endpoint = TcpEndpoint("a", TransportSettings(runtime_dir=tmp_path))
    await endpoint.start(Inbox())
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        address = type(endpoint.address)("tcp", f"127.0.0.1:{port}", "")
        with pytest.raises(PartitionLost):
            await asyncio.wait_for(endpoint.connect(address, 0.2), 2)
    await endpoint.close()


async def test_a_stalled_link_leaves_half_of_the_memory_to_others() -> None:
    pool = MemoryPool(8 * MIB, private_segment)
    stalled, other = MemoryShare(pool), MemoryShare(pool)
    held = [await stalled.acquire(MIB, 1) for _ in range(4)]
    with pytest.raises(Overloaded):
        await stalled.acquire(MIB, 0.01)
    blocks = [await other.acquire(MIB, 1) for _ in range(4)]
    for share, taken in ((stalled, held), (other, blocks)):
        for block in taken:
            share.release(block)
        share.close(PartitionLost("done"))
    assert pool.reserved == 0


async def test_a_large_variety_of_sizes_never_wedges_a_pool() -> None:
    pool = MemoryPool(8 * MIB, private_segment)
    share = MemoryShare(pool)
    for nbytes in [1, 5000, 70_000, MIB, 3 * MIB, 4097, 300_000, 4 * MIB, 1, 2 * MIB] * 5:
        share.release(await share.acquire(nbytes, 1))
        assert pool.reserved <= pool.capacity
    share.close(PartitionLost("done"))
    assert pool.reserved == 0


async def test_a_socket_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = socket_path(tmp_path, "b")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    endpoint = ShmEndpoint("b", TransportSettings(runtime_dir=tmp_path))
    await endpoint.start(Inbox())
    assert not (await endpoint.connect(endpoint.address, 5)).closed
    await endpoint.close()
    assert not path.exists()


def test_socket_paths_fit_and_differ(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    paths = {socket_path(folder, peer) for folder in (tmp_path, deep) for peer in ("a/b", "a_b")}
    assert len(paths) == 4
    assert all(len(bytes(path)) <= 107 for path in paths)


async def test_silent_connections_keep_nobody_out(endpoint: Endpoint) -> None:
    await endpoint.start(Inbox())
    silent = [await dial(endpoint) for _ in range(700)]
    for _ in range(20):
        link = await endpoint.connect(endpoint.address, 5)
        assert not link.closed
        await link.close()
    for sock in silent:
        sock.close()


async def test_who_says_something_and_goes_silent_makes_room(tmp_path: Path) -> None:
    endpoint = TcpEndpoint("b", TransportSettings(runtime_dir=tmp_path))
    await endpoint.start(Inbox())
    half = [await dial(endpoint) for _ in range(200)]
    for sock in half:
        await asyncio.get_running_loop().sock_sendall(sock, HELLO[:5])
    link = None
    async with asyncio.timeout(20):
        while link is None:  # of one address and on a busy machine it may be taken for one of them
            with contextlib.suppress(PartitionLost):
                link = await endpoint.connect(endpoint.address, 5)
    assert not link.closed
    await asyncio.wait_for(asyncio.gather(*map(end_of, half)), 20)
    for sock in half:
        sock.close()
    assert len(endpoint._receivers) == 1
    await endpoint.close()


async def test_failed_handshakes_leave_nothing_behind(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certs")
    settings = TransportSettings(
        runtime_dir=tmp_path, security=certificates.transport("agent", "b")
    )
    endpoint = TcpEndpoint("b", settings)
    await endpoint.start(Inbox())
    for begun in (b"\x16", b"\x16\x03\x01\x00\x05nonsense"):
        for _ in range(20):
            with await dial(endpoint) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, begun)
    link = await endpoint.connect(endpoint.address, 10, "b")
    assert len(endpoint._receivers) == 1
    assert not link.closed
    await endpoint.close()


@pytest.mark.parametrize(
    "message",
    [
        encode_prefix(MessagePrefix(MessageKind.FRAME, 0, 1 << 20)),
        encode_prefix(MessagePrefix(MessageKind.HELLO, 900_000)),
    ],
    ids=["frame", "long name"],
)
async def test_no_memory_is_given_to_who_has_not_said_who_they_are(
    endpoint: Endpoint, message: bytes
) -> None:
    await endpoint.start(Inbox())
    with await dial(endpoint) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, message)
        await end_of(sock)


async def test_a_frame_that_stops_in_the_middle_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_stream, "STALLED_S", 0.2)
    endpoint = TcpEndpoint("b", TransportSettings(runtime_dir=tmp_path))
    await endpoint.start(Inbox())
    with await dial(endpoint) as sock:
        begun = HELLO + encode_prefix(MessagePrefix(MessageKind.FRAME, 0, MIB)) + bytes(100_000)
        await asyncio.get_running_loop().sock_sendall(sock, begun)
        await end_of(sock)
    assert endpoint._receive_pool.reserved == 0
    await endpoint.close()
