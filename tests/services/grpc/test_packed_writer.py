from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from catenary_services.errors import DeadlineExceeded, Overloaded
from catenary_services.grpc.packed_writer import LINGER_S, PackedWriter


class Stream:
    """Keeps what was sent; sends wait while `gate` is closed."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.sending = asyncio.Event()

    async def send(self, batch: list[int]) -> None:
        self.sent.append(batch)
        self.sending.set()
        await self.gate.wait()


async def test_everything_queued_goes_into_one_send() -> None:
    stream = Stream()
    writer = PackedWriter(stream.send)
    for number in range(5):
        writer.put(number)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(writer.run())
        await writer.flush(1.0)
        assert stream.sent == [[0, 1, 2, 3, 4]]
        stream.gate.clear()
        stream.sending.clear()
        writer.put(5)
        await stream.sending.wait()
        for number in range(6, 9):
            writer.put(number)
        assert writer.pending == 3
        stream.gate.set()
        await writer.flush(1.0)
        assert stream.sent[1:] == [[5], [6, 7, 8]]
        task.cancel()


async def test_full_queue_refuses_and_keeps_what_it_has() -> None:
    stream = Stream()
    writer = PackedWriter(stream.send, capacity=2)
    writer.put(1)
    writer.put(2)
    with pytest.raises(Overloaded):
        writer.put(3)
    task = asyncio.create_task(writer.run())
    await writer.flush(1.0)
    assert stream.sent == [[1, 2]]
    writer.put(4)
    await writer.flush(1.0)
    assert stream.sent == [[1, 2], [4]]
    task.cancel()


async def test_flush_returns_at_once_when_nothing_is_queued() -> None:
    await PackedWriter(Stream().send).flush(0.0)


async def test_flush_has_a_deadline() -> None:
    stream = Stream()
    stream.gate.clear()
    writer = PackedWriter(stream.send)
    writer.put(1)
    task = asyncio.create_task(writer.run())
    with pytest.raises(DeadlineExceeded):
        await writer.flush(0.01)
    task.cancel()


async def test_failure_of_send_ends_the_writer() -> None:
    async def send(_: list[int]) -> None:
        raise ConnectionError("gone")

    writer: PackedWriter[int] = PackedWriter(send)
    writer.put(1)
    with pytest.raises(ConnectionError):
        await writer.run()


async def test_order_survives_many_wakes() -> None:
    stream = Stream()
    writer = PackedWriter(stream.send)
    task = asyncio.create_task(writer.run())
    for number in range(1000):
        writer.put(number)
        if number % 7 == 0:
            await asyncio.sleep(0)
    await writer.flush(1.0)
    assert [number for batch in stream.sent for number in batch] == list(range(1000))
    assert 1 < len(stream.sent) < 1000
    task.cancel()


async def test_sends_begin_a_while_after_each_other() -> None:
    starts: list[float] = []
    sent: list[int] = []
    loop = asyncio.get_running_loop()

    async def send(batch: list[int]) -> None:
        starts.append(loop.time())
        sent.extend(batch)

    writer = PackedWriter(send, spacing_s=0.05)
    task = asyncio.create_task(writer.run())
    for number in range(20):
        writer.put(number)
        await asyncio.sleep(0.01)
    await writer.flush(30.0)
    assert sent == list(range(20))
    assert len(starts) > 1
    assert all(later - earlier >= 0.049 for earlier, later in pairwise(starts))
    task.cancel()


async def test_a_message_that_may_wait_goes_with_the_next_or_alone_after_a_while() -> None:
    loop = asyncio.get_running_loop()
    queued_s: dict[int, float] = {}
    alone_s: list[float] = []
    sent: list[int] = []

    async def send(batch: list[int]) -> None:
        sent.extend(batch)
        if all(number % 2 for number in batch):
            alone_s.append(loop.time() - queued_s[batch[0]])

    writer = PackedWriter(send)
    task = asyncio.create_task(writer.run())
    for number in range(0, 40, 2):
        writer.put(number)
        await asyncio.sleep(0.001)
        queued_s[number + 1] = loop.time()
        writer.put_soon(number + 1)
        await asyncio.sleep(0.003)
    await writer.flush(30.0)
    assert sent == list(range(40))
    assert alone_s, "the last one goes alone"
    assert min(alone_s) >= LINGER_S - 0.002
    task.cancel()
