"""However a stream of requests is cut into reads, its answers are the same."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_gateway.endpoints.connections.http_connection import HttpConnection
from gateway_harness import Stage, stage
from shared_helpers.http_texts import LIVE, chunked, posted, toy, toy_body
from shared_helpers.scripted_transport import ScriptedTransport

ONE, MANY = np.ones((1, 4), np.float32), np.ones((9_000, 4), np.float32)
BODY, JSON_BYTES = toy_body(ONE, "chunked")
PLAIN = [
    toy(ONE, "a"),
    LIVE,
    posted(b"{"),
    toy(MANY, "many"),
    posted(b"{}", path="/v2/repository/index"),
    *(toy(ONE, f"b{at}") for at in range(3)),
    LIVE,
    toy(ONE, "gzip", "Content-Encoding: identity"),
    toy(ONE, "c"),
]
REST = [
    chunked(BODY, f"Inference-Header-Content-Length: {JSON_BYTES}"),
    toy(ONE, "last"),
    LIVE,
]
STREAM = b"".join(PLAIN + REST)


class ScriptedClient:
    """A client whose every read by the gateway is scripted."""

    def __init__(self, running: Stage) -> None:
        self.transport = ScriptedTransport()
        self.connection: HttpConnection = running.gateway._http._connections.connection()
        self.connection.connection_made(self.transport)

    async def send(self, data: bytes) -> None:
        while data:
            async with asyncio.timeout(60):
                while not self.transport.reads:
                    await asyncio.sleep(0)
            room = self.connection.get_buffer(-1)
            piece, data = data[: len(room)], data[len(room) :]
            room[: len(piece)] = piece
            self.connection.buffer_updated(len(piece))

    async def answers(self, count: int) -> list[tuple[int, bytes]]:
        async with asyncio.timeout(60):
            while len(found := list(answers_in(bytes(self.transport.written)))) < count:
                await asyncio.sleep(0.001)
        return found

    def gone(self) -> None:
        self.connection.connection_lost(None)


def answers_in(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields status and body of every complete answer."""
    stream = io.BytesIO(data)
    while line := stream.readline():
        size = 0
        while (field := stream.readline().strip()) != b"":
            name, _, value = field.partition(b": ")
            size = int(value) if name.lower() == b"content-length" else size
        body = stream.read(size)
        if len(body) == size:
            yield int(line.split()[1]), body


@pytest.fixture(scope="module")
def loop_and_stage(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[asyncio.Runner, Stage]]:
    folder: Path = tmp_path_factory.mktemp("cuts")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        entered = stack.enter_async_context(stage(folder, bad_requests_per_s=1e6))
        yield runner, runner.run(entered)
        runner.run(stack.aclose())


async def cut(running: Stage, ends: list[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """The answers if the stream is read up to each of `ends`, some turns of the loop between."""
    client, at = ScriptedClient(running), 0
    for end, turns in [*sorted(ends), (len(STREAM), 0)]:
        await client.send(STREAM[at:end])
        at = max(at, end)
        for _ in range(turns):
            await asyncio.sleep(0)
    found = await client.answers(len(PLAIN + REST))
    client.gone()
    return found


def test_whole_streams_are_answered_request_by_request(
    loop_and_stage: tuple[asyncio.Runner, Stage],
) -> None:
    runner, running = loop_and_stage
    found = runner.run(cut(running, []))
    assert [status for status, _ in found] == [400 if r == PLAIN[2] else 200 for r in PLAIN + REST]
    ids = [json.loads(b.split(b"}]}")[0] + b"}]}")["id"] for _, b in found if b'"id"' in b]
    assert ids == ["a", "many", "b0", "b1", "b2", "gzip", "c", "chunked", "last"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, len(STREAM)), st.integers(0, 4)), max_size=12))
def test_cuts_change_no_answer(
    loop_and_stage: tuple[asyncio.Runner, Stage], ends: list[tuple[int, int]]
) -> None:
    runner, running = loop_and_stage
    assert runner.run(cut(running, ends)) == runner.run(cut(running, []))


def test_byte_by_byte_the_answers_are_the_same(
    loop_and_stage: tuple[asyncio.Runner, Stage],
) -> None:
    runner, running = loop_and_stage
    small = sum(len(request) for request in PLAIN[:3]) + 400
    ends = [(at, at % 2) for at in range(1, small)]
    assert runner.run(cut(running, ends)) == runner.run(cut(running, []))


def test_nothing_is_read_ahead_without_end(loop_and_stage: tuple[asyncio.Runner, Stage]) -> None:
    runner, running = loop_and_stage

    async def scene() -> None:
        client = ScriptedClient(running)
        running.agent.hold = True
        while client.transport.reads:
            await client.send(toy(ONE, "x"))
        assert len(client.connection._pending) < 200_000
        running.agent.hold = False
        client.gone()

    runner.run(scene())


def test_who_does_not_read_answers_gets_no_more_of_them(
    loop_and_stage: tuple[asyncio.Runner, Stage],
) -> None:
    runner, running = loop_and_stage

    async def scene() -> None:
        client = ScriptedClient(running)
        await client.send(toy(ONE, "a"))
        client.connection.pause_writing()
        await client.send(toy(ONE, "b") + LIVE + toy(ONE, "c"))
        await client.answers(1)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(list(answers_in(bytes(client.transport.written)))) == 1
        client.connection.resume_writing()
        assert [status for status, _ in await client.answers(4)] == [200] * 4
        client.gone()

    runner.run(scene())
