"""A stream of messages over a Unix socket: what is written leaves in order, and together."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from catenary_services.errors import PartitionLost
from catenary_services.transport.frames import Kind, Prefix, encode_prefix
from catenary_services.transport.shared_memory.unix_stream import UnixStream


@dataclass
class End:
    """One end, and what it heard."""

    stream: UnixStream = field(init=False)
    heard: list[tuple[Kind, bytes]] = field(default_factory=list)
    lost: list[PartitionLost] = field(default_factory=list)

    def listen(self, sock: socket.socket) -> None:
        self.stream = UnixStream(sock, self._hear, self.lost.append, 1 << 20)
        self.stream.trust()

    def _hear(self, prefix: Prefix, body: memoryview) -> None:
        self.heard.append((prefix.kind, bytes(body)))

    async def has_heard(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.heard) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (ours, theirs):
        sock.setblocking(False)
    near, far = End(), End()
    near.listen(ours)
    far.listen(theirs)
    yield near, far, theirs
    near.stream.close(PartitionLost("the test is over"))
    far.stream.close(PartitionLost("the test is over"))


def frame(body: bytes) -> bytes:
    return encode_prefix(Prefix(Kind.FRAME, len(body))) + body


class TestWriting:
    async def test_what_is_written_in_one_turn_is_one_packet(
        self, ends: tuple[End, End, socket.socket]
    ) -> None:
        near, _, theirs = ends
        asyncio.get_running_loop().remove_reader(theirs.fileno())
        messages = [frame(b"%d" % number) for number in range(20)]
        for message in messages:
            assert near.stream.write(message) is None
        with pytest.raises(BlockingIOError):
            theirs.recv(1, socket.MSG_PEEK)  # nothing leaves before the turn ends
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert theirs.recv(1 << 16) == b"".join(messages)

    async def test_descriptors_stay_with_their_message(
        self, ends: tuple[End, End, socket.socket]
    ) -> None:
        near, far, _ = ends
        reading, writing = os.pipe()
        near.stream.write(frame(b"before"))
        near.stream.write(frame(b"with"), reading)
        near.stream.write(frame(b"after"))
        await far.has_heard(3)
        assert [body for _, body in far.heard] == [b"before", b"with", b"after"]
        came = far.stream.take_descriptor()
        os.write(writing, b"x")
        assert os.read(came, 1) == b"x"
        for fd in (reading, writing, came):
            os.close(fd)

    async def test_order_is_kept_when_the_peer_takes_its_time(
        self, ends: tuple[End, End, socket.socket]
    ) -> None:
        near, far, _ = ends
        far.stream.pause()
        bodies = [b"%06d" % number * (1 + number % 700) for number in range(2_000)]
        waits = []
        for number, body in enumerate(bodies):
            waits.append(near.stream.write(frame(body)))
            if number % 7 == 0:
                await asyncio.sleep(0)
        assert any(wait is not None for wait in waits)  # more than the kernel takes
        far.stream.resume()
        await far.has_heard(len(bodies))
        assert [body for _, body in far.heard] == bodies
        assert all(wait is None or wait.done() for wait in waits)

    async def test_what_was_written_before_the_end_still_arrives(
        self, ends: tuple[End, End, socket.socket]
    ) -> None:
        near, far, _ = ends
        near.stream.write(frame(b"last words"))
        near.stream.close(PartitionLost("closed"))
        await far.has_heard(1)
        assert far.heard[0][1] == b"last words"

    async def test_a_peer_that_is_gone_is_noticed(
        self, ends: tuple[End, End, socket.socket]
    ) -> None:
        near, far, _ = ends
        far.stream.close(PartitionLost("gone"))
        near.stream.write(frame(b"x"))
        async with asyncio.timeout(20):
            while not near.lost:
                await asyncio.sleep(0.001)
        assert near.stream.closed
        assert len(near.lost) == 1
