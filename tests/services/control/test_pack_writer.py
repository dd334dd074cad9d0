"""Messages go in order, in as few packs as the turns of the event loop allow, and never without bound."""

from __future__ import annotations

import asyncio
import time
from itertools import chain, pairwise

import pytest

from catenary_services.control.pack_writer import LINGER_S, MOST_AT_ONCE, PackWriter
from catenary_services.errors import Overloaded


class Stream:
    """Keeps what was written, and when; is full while a test says so."""

    def __init__(self) -> None:
        self.packs: list[list[int]] = []
        self.moments_s: list[float] = []
        self.full = False

    def write(self, pack: list[int]) -> None:
        self.packs.append(pack)
        self.moments_s.append(time.monotonic())

    def is_full(self) -> bool:
        return self.full

    async def has(self, packs: int) -> None:
        async with asyncio.timeout(30):
            while len(self.packs) < packs:
                await asyncio.sleep(0.001)


async def test_what_comes_within_one_turn_of_the_loop_is_one_pack() -> None:
    stream = Stream()
    writer: PackWriter[int] = PackWriter(stream.write, stream.is_full)
    for number in range(5):
        writer.put(number)
    assert stream.packs == []
    await asyncio.sleep(0)
    assert stream.packs == [[0, 1, 2, 3, 4]]
    writer.put(5)
    await asyncio.sleep(0)
    assert stream.packs[1:] == [[5]]


async def test_what_may_wait_goes_with_the_next_message_or_after_a_moment() -> None:
    stream = Stream()
    writer: PackWriter[int] = PackWriter(stream.write, stream.is_full)
    writer.put_soon(1)
    writer.put(2)
    await asyncio.sleep(0)
    assert stream.packs == [[1, 2]]
    began_s = time.monotonic()
    writer.put_soon(3)
    writer.put_soon(4)
    await stream.has(2)
    assert stream.packs[1] == [3, 4]
    assert stream.moments_s[1] - began_s >= LINGER_S - 0.002


async def test_a_peer_that_reads_too_slowly_gets_the_rest_later_and_in_order() -> None:
    stream = Stream()
    writer: PackWriter[int] = PackWriter(stream.write, stream.is_full)
    stream.full = True
    for number in range(3):
        writer.put(number)
        await asyncio.sleep(0)
    assert stream.packs == []
    assert writer.pending == 3
    stream.full = False
    writer.resumed()
    await asyncio.sleep(0)
    assert stream.packs == [[0, 1, 2]]


async def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    stream = Stream()
    writer: PackWriter[int] = PackWriter(stream.write, stream.is_full, capacity=2)
    writer.put(1)
    writer.put_soon(2)
    for put in (writer.put, writer.put_soon):
        with pytest.raises(Overloaded):
            put(3)
    await asyncio.sleep(0)
    assert stream.packs == [[1, 2]]


async def test_packs_are_some_time_apart_if_that_is_wanted() -> None:
    stream = Stream()
    writer: PackWriter[int] = PackWriter(stream.write, stream.is_full, spacing_s=0.02)
    for number in range(40):
        writer.put(number)
        await asyncio.sleep(0.002)
    await stream.has(3)
    assert list(chain.from_iterable(stream.packs)) == list(range(sum(map(len, stream.packs))))
    # Event loops round their timers to a millisecond.
    assert min(b - a for a, b in pairwise(stream.moments_s)) >= 0.02 - 0.002


async def test_a_pack_has_no_more_messages_than_a_reader_takes() -> None:
    stream = Stream()
    writer: PackWriter[int] = PackWriter(stream.write, stream.is_full)
    for number in range(2 * MOST_AT_ONCE + 1):
        writer.put(number)
    writer.flush()
    assert [len(pack) for pack in stream.packs] == [MOST_AT_ONCE, MOST_AT_ONCE, 1]
    await asyncio.sleep(0)
    assert len(stream.packs) == 3


async def test_a_closed_writer_writes_nothing_more() -> None:
    stream = Stream()
    writer: PackWriter[int] = PackWriter(stream.write, stream.is_full)
    writer.put(1)
    writer.put_soon(2)
    writer.close()
    await asyncio.sleep(2 * LINGER_S)
    assert (stream.packs, writer.pending) == ([], 0)
