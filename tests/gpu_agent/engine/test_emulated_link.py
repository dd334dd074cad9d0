"""Frames between agents that take the time of a slower network."""

from __future__ import annotations

import asyncio
import time

import pytest

from catenary_agent.engine.emulated_link import EmulatedLink
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.transport.interface import NOBODY, Capabilities

BYTES_PER_SECOND = 100_000
SIZE = 5_000
TAKES_S = SIZE / BYTES_PER_SECOND
"""50 ms: long beside a busy machine's delays, short for a test."""
EARLY_S = 0.002
"""Timers of the event loop have a resolution of a millisecond."""


class Frame:
    """A frame sent now (or a while ago), of `SIZE` bytes."""

    def __init__(self, *, position: int = 1, ago_s: float = 0.0) -> None:
        header = frame_pb2.FrameHeader(
            kind=frame_pb2.FRAME_KIND_FEATURE_MAP,
            position=position,
            sent_monotonic_ns=time.monotonic_ns() - round(ago_s * 1e9),
        )
        self.header = header.SerializeToString()
        self.payload = memoryview(bytes(SIZE))
        self.capabilities = Capabilities("shm", same_host=True)
        self.sender = NOBODY
        self.released = False

    def release(self) -> None:
        self.released = True


class Taken:
    """What was handed on, and when."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.frames: asyncio.Queue[tuple[Frame, float]] = asyncio.Queue()

    def take(self, frame: Frame) -> None:
        self.frames.put_nowait((frame, time.monotonic() - self.started))

    async def next(self) -> tuple[Frame, float]:
        async with asyncio.timeout(30):
            return await self.frames.get()

    async def next_after(self, seconds: float) -> Frame:
        """Returns the next frame, which came no earlier than that."""
        frame, after_s = await self.next()
        assert after_s >= seconds - EARLY_S
        return frame


async def test_a_frame_arrives_when_its_last_byte_would() -> None:
    link, taken = EmulatedLink(BYTES_PER_SECOND), Taken()
    frame = Frame()
    link.on_frame(frame, taken.take)
    assert taken.frames.empty()
    assert await taken.next_after(TAKES_S) is frame


async def test_time_already_spent_under_way_counts() -> None:
    link, taken = EmulatedLink(BYTES_PER_SECOND), Taken()
    frame = Frame(ago_s=0.8 * TAKES_S)
    link.on_frame(frame, taken.take)
    arrives_s = link._under_way[frame].when()
    assert arrives_s - asyncio.get_running_loop().time() <= 0.2 * TAKES_S
    assert (await taken.next())[0] is frame


async def test_the_downlink_takes_one_frame_after_the_other() -> None:
    link, taken = EmulatedLink(BYTES_PER_SECOND), Taken()
    first, second = Frame(), Frame()
    link.on_frame(first, taken.take)
    link.on_frame(second, taken.take)
    assert await taken.next_after(TAKES_S) is first
    assert await taken.next_after(2 * TAKES_S) is second


async def test_frames_of_gateways_are_not_delayed() -> None:
    link, taken = EmulatedLink(BYTES_PER_SECOND), Taken()
    frame = Frame(position=0)
    link.on_frame(frame, taken.take)
    assert taken.frames.get_nowait()[0] is frame


async def test_a_frame_that_is_none_is_left_to_the_engine() -> None:
    link, taken = EmulatedLink(BYTES_PER_SECOND), Taken()
    frame = Frame()
    frame.header = b"\xff\xff"
    link.on_frame(frame, taken.take)
    assert taken.frames.get_nowait()[0] is frame


async def test_the_uplink_sends_one_frame_after_the_other() -> None:
    link = EmulatedLink(BYTES_PER_SECOND)
    started = time.monotonic()
    with pytest.raises(StopIteration):  # it waits for nothing
        link.turn(SIZE).send(None)
    await link.turn(SIZE)
    assert time.monotonic() - started >= TAKES_S - EARLY_S


async def test_what_is_under_way_at_the_end_gives_its_memory_back() -> None:
    link, taken = EmulatedLink(BYTES_PER_SECOND), Taken()
    frame = Frame()
    link.on_frame(frame, taken.take)
    link.close()
    assert frame.released
    assert taken.frames.empty()
