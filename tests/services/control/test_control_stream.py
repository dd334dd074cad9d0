"""A control stream hands over whole messages, however their bytes arrive, and bounds what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_services.control.arrival_budget import ArrivalBudget
from catenary_services.control.control_stream import (
    MAX_OPENING_BYTES,
    MAX_PACK_BYTES,
    ControlStream,
)
from catenary_services.errors import CatenaryError, InvalidInput, Overloaded, Unavailable
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix

BUDGET_BYTES = 64 << 20


class Recorder:
    """Keeps what a stream hands over."""

    def __init__(self) -> None:
        self.messages: list[tuple[MessageKind, bytes]] = []
        self.error: CatenaryError | None = None
        self.over = asyncio.Event()
        self.react: Callable[[bytes], None] = lambda _: None
        self.went_on = 0

    def received(self, kind: MessageKind, data: bytes) -> None:
        self.messages.append((kind, data))
        self.react(data)

    def resumed(self) -> None:
        self.went_on += 1

    def ended(self, error: CatenaryError) -> None:
        assert self.error is None, "ended twice"
        self.error = error
        self.over.set()


def packed(data: bytes, kind: MessageKind = MessageKind.PACK) -> bytes:
    return encode_prefix(MessagePrefix(kind, payload_bytes=len(data))) + data


@asynccontextmanager
async def listening(
    budget: ArrivalBudget, *, trusts: bool = True
) -> AsyncIterator[tuple[int, list[tuple[ControlStream, Recorder]]]]:
    made: list[tuple[ControlStream, Recorder]] = []

    def accept() -> ControlStream:
        recorder = Recorder()
        stream = ControlStream(recorder, budget)
        if trusts:
            stream.trust()
        made.append((stream, recorder))
        return stream

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], made
    finally:
        server.close()
        for stream, _ in made:
            stream.abort()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def fed(chunks: list[bytes]) -> Recorder:
    """Returns what a trusted stream hands over that reads these chunks, without a connection."""

    async def run() -> Recorder:
        recorder = Recorder()
        budget = ArrivalBudget(BUDGET_BYTES)
        stream = ControlStream(recorder, budget)
        stream.trust()
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest and not stream.closed:
                room = stream.get_buffer(-1)
                assert len(room)
                taken = min(len(room), len(rest))
                room[:taken] = rest[:taken]
                del room
                stream.buffer_updated(taken)
                rest = rest[taken:]
        await asyncio.sleep(0)
        assert budget.held == 0 or recorder.error is None
        return recorder

    return asyncio.run(run())


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 31, 32, 33, 500, 40_000, 200_000]), max_size=6),
    cuts=st.lists(st.integers(1, 70_000), max_size=30),
)
def test_messages_arrive_whole_however_their_bytes_are_cut(
    sizes: list[int], cuts: list[int]
) -> None:
    sent = [bytes([at]) * size for at, size in enumerate(sizes)]
    line = b"".join(map(packed, sent))
    chunks, begin = [], 0
    for cut in cuts:
        chunks.append(line[begin : begin + cut])
        begin += cut
    recorder = fed([each for each in [*chunks, line[begin:]] if each])
    assert recorder.error is None
    assert [data for _, data in recorder.messages] == sent


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=32, max_size=200))
def test_garbage_ends_the_stream_and_nothing_else(garbage: bytes) -> None:
    recorder = fed([garbage])
    assert isinstance(recorder.error, InvalidInput)
    assert recorder.messages == []


def test_a_longer_message_than_any_ends_the_stream_before_it_arrives() -> None:
    prefix = encode_prefix(MessagePrefix(MessageKind.PACK, payload_bytes=MAX_PACK_BYTES + 1))
    assert "exceeds" in str(fed([prefix]).error)


async def test_who_is_not_known_sends_no_packs_and_no_long_openings() -> None:
    async with listening(ArrivalBudget(BUDGET_BYTES), trusts=False) as (port, made):
        for first in (
            packed(b"x"),
            packed(b"x" * (MAX_OPENING_BYTES + 1), MessageKind.HELLO),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            await asyncio.wait_for(reader.read(), 30)
            writer.close()
            await until(lambda: made[-1][1].error)
            assert isinstance(made[-1][1].error, InvalidInput)
            assert made[-1][1].messages == []


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("sched-1 stands by", retry_after_ns=700_000_000),
        InvalidInput("hello.epoch", "7 cannot be"),
    ],
)
async def test_the_peer_is_told_why_a_stream_ends(error: CatenaryError) -> None:
    async with listening(ArrivalBudget(BUDGET_BYTES)) as (port, made):
        mine = Recorder()
        stream = ControlStream(mine, ArrivalBudget(BUDGET_BYTES))
        stream.trust()
        await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", port)
        await until(lambda: made)
        made[0][0].write(MessageKind.PACK, b"last words")
        made[0][0].close(error)
        await asyncio.wait_for(mine.over.wait(), 30)
        assert mine.messages == [(MessageKind.PACK, b"last words")]
        told = mine.error
        assert told is not None
        assert (told.reason, told.message) == (error.reason, error.message)
        assert told.details.get("field") == error.details.get("field")
        if error.retry_after_ns:
            assert told.retry_after_ns == error.retry_after_ns


async def test_a_bug_in_a_handler_ends_only_its_stream() -> None:
    async with listening(ArrivalBudget(BUDGET_BYTES)) as (port, made):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: made)

        def fail(_: bytes) -> None:
            raise RuntimeError("secret")

        made[0][1].react = fail
        writer.write(packed(b"x") + packed(b"y"))
        said = await asyncio.wait_for(reader.read(), 30)
        assert b"internal error, id" in said
        assert b"secret" not in said
        assert len(made[0][1].messages) == 1
        writer.close()


async def test_of_many_unfinished_messages_the_longest_is_given_up() -> None:
    budget = ArrivalBudget(1 << 20)
    async with listening(budget) as (port, made):
        writers = []
        prefix = encode_prefix(MessagePrefix(MessageKind.PACK, payload_bytes=MAX_PACK_BYTES))
        for nbytes in (100_000, 3_000_000):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(prefix + bytes(nbytes))
            writers.append(writer)
        await until(lambda: len(made) == 2 and any(each.error for _, each in made))
        await until(lambda: budget.held <= 1 << 20)
        errors = [each.error for _, each in made]
        assert errors[0] is None
        assert isinstance(errors[1], Overloaded)
        for writer in writers:
            writer.close()


async def test_a_stream_is_full_until_its_peer_has_read() -> None:
    async with listening(ArrivalBudget(BUDGET_BYTES)) as (port, made):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        await until(lambda: made)
        stream, recorder = made[0]
        pack, sent = bytes(1 << 20), 0
        while not stream.is_full:
            stream.write(MessageKind.PACK, pack)
            sent += len(packed(pack))
            assert sent < 1 << 30
            await asyncio.sleep(0)
        assert stream.unsent_bytes > 0
        assert recorder.went_on == 0
        async with asyncio.timeout(60):
            await reader.readexactly(sent)
        await until(lambda: recorder.went_on == 1)
        assert not stream.is_full
        writer.close()
