"""Connections whose requests are answered by the gateway itself, by aiohttp, and by both in turns."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from catenary_gateway.endpoints import http_bodies
from catenary_gateway.endpoints.connections import http_connection
from catenary_services.security.key_file import add_key
from catenary_services.tcp_listener import TcpListener
from certificates import Certificates
from gateway_harness import Stage, stage
from shared_helpers.http_texts import (
    INFER,
    INFER_FREE,
    LIVE,
    answer_from,
    chunked,
    posted,
    toy,
    toy_body,
)
from shared_helpers.waiting import until

ONE = np.ones((1, 4), np.float32)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(running: Stage, tls: ssl.SSLContext | None = None) -> AsyncIterator[Streams]:
    host, port = running.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.close()


def with_aiohttp(running: Stage) -> int:
    """How many connections aiohttp has."""
    server = running.gateway._http._runner.server
    assert server is not None
    return len(server.connections)


async def test_aiohttp_has_a_connection_only_while_it_answers_a_request(running: Stage) -> None:
    async with connected(running) as (reader, writer):
        for at in range(3):
            values = np.full((2, 4), at, np.float32)
            writer.write(toy(values, f"me-{at}"))
            answer = await answer_from(reader)
            assert answer.id == answer.headers["x-request-id"] == f"me-{at}"
            assert np.array_equal(answer.values, values.ravel())
            await until(lambda: with_aiohttp(running) == 0, "aiohttp has no connection")
            for request in (LIVE, posted(b"{}", path="/v2/repository/index"), LIVE):
                writer.write(request)
                assert (await answer_from(reader)).status == 200
                assert with_aiohttp(running) == 1


async def test_after_what_is_not_plain_aiohttp_has_the_connection_for_good(running: Stage) -> None:
    body, size = toy_body(ONE, "me")
    json_size = f"Inference-Header-Content-Length: {size}"
    async with connected(running) as (reader, writer):
        writer.write(toy(ONE, "first") + chunked(body, json_size) + toy(ONE, "last") + LIVE)
        assert [(await answer_from(reader)).id for _ in range(3)] == ["first", "me", "last"]
        assert (await answer_from(reader)).status == 200
        assert with_aiohttp(running) == 1


async def test_a_client_that_waits_to_be_told_is_told_to_go_on(running: Stage) -> None:
    body, size = toy_body(ONE, "me")
    request = posted(body, f"Inference-Header-Content-Length: {size}", "Expect: 100-continue")
    async with connected(running) as (reader, writer):
        writer.write(request[: -len(body)])
        assert (await answer_from(reader)).status == 100
        writer.write(body)
        assert (await answer_from(reader)).id == "me"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (posted(b"{}", "Content-Length: 3"), 400),
        (chunked(b"{}", "Content-Length: 3"), 400),
        (chunked(b"{}").replace(b"\r\n2\r\n", b"\r\n0x2\r\n"), 400),
        (chunked(b"{}").replace(b"\r\n2\r\n", b"\r\n-2\r\n"), 400),
        (posted(b"{}").replace(b"Host: a", b"Host: a\r\n folded"), 400),
        (posted(b"{}").replace(b"Host: a\r\n", b"Host: a\n"), 400),
        (posted(b"{}").replace(b"Host: a", b"Host : a"), 400),
        (posted(b"{}", "X: " + "a" * 9000), 400),
        (b"\x16\x03\x01\x02\x00\r\n", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    ],
    ids=["two lengths", "chunks and length", "hex chunk", "negative chunk", "folded", "bare LF",
         "space", "long", "TLS", "LF only"],
)  # fmt: skip
async def test_what_two_parsers_might_read_in_two_ways_is_refused_and_ends_the_connection(
    running: Stage, request_bytes: bytes, status: int
) -> None:
    for before in (b"", toy(ONE, "me")):
        async with connected(running) as (reader, writer):
            writer.write(before + request_bytes + b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
            if before:
                assert (await answer_from(reader)).id == "me"
            assert (await answer_from(reader)).status == status
            async with asyncio.timeout(60):
                assert b"smuggled" not in await reader.read()


async def test_errors_say_the_same_whoever_reads_the_request(running: Stage) -> None:
    bodies = [b"{", b'{"inputs":[]}', b"", toy_body(ONE)[0]]
    paths = [
        INFER,
        "/v2/models/nobody/infer",
        "/v2/models/cold/infer",
        "/v2/models/toy/versions/9/infer",
    ]
    cases = [(path, body) for path in paths for body in bodies]
    async with connected(running) as (ours, to_ours), connected(running) as (theirs, to_theirs):
        for path, body in cases:
            to_ours.write(posted(body, path=path))
            to_theirs.write(chunked(body, path=path))
            mine, other = await answer_from(ours), await answer_from(theirs)
            assert (mine.status, mine.body) == (other.status, other.body)
            assert mine.status >= 400
            assert list(json.loads(mine.body)) == ["error"]
            alike = ("content-type", "server", "retry-after")
            assert [mine.headers.get(n) for n in alike] == [other.headers.get(n) for n in alike]


async def test_who_is_refused_by_the_headers_is_told_so_before_the_body(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "ci", ["infer"])
    body, size = toy_body(np.ones((50_000, 4), np.float32))
    request = posted(body, f"Inference-Header-Content-Length: {size}")
    async with stage(tmp_path, api_keys_file=tmp_path / "keys.json") as running:
        async with connected(running) as (reader, writer):
            writer.write(request[: -len(body)])
            answer = await answer_from(reader)
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            # The body is thrown away as it comes, and the next request is answered.
            writer.write(body + toy(ONE, "me", f"Authorization: Bearer {key}"))
            assert (await answer_from(reader)).id == "me"
        assert running.gateway._pipeline.capacity.bytes == 0


async def test_a_body_too_large_is_refused_by_its_announcement(tmp_path: Path) -> None:
    async with stage(tmp_path, max_request_bytes=65_536) as running:
        async with connected(running) as (reader, writer):
            writer.write(posted(bytes(65_537))[:-65_537])
            assert (await answer_from(reader)).status == 413
        async with connected(running) as (reader, writer):
            writer.write(posted(b"").replace(b"Length: 0", b"Length: 1" + b"0" * 17))
            assert (await answer_from(reader)).status == 413


async def test_large_tensors_come_back_as_they_went(running: Stage) -> None:
    values = np.random.default_rng(0).standard_normal((2, 400_000)).astype(np.float32)
    async with connected(running) as (reader, writer):
        for size in (400_000, 75_000, 1):
            writer.write(toy(values[:, :size], path=INFER_FREE) * 2)
            for _ in range(2):
                answer = await answer_from(reader)
                assert np.array_equal(answer.values, values[:, :size].ravel())
    capacity = running.gateway._pipeline.capacity
    assert (capacity.bytes, capacity.requests) == (0, 0)


async def test_requests_are_answered_in_their_order_one_at_a_time(running: Stage) -> None:
    running.agent.hold = True
    async with connected(running) as (reader, writer):
        writer.write(b"".join(toy(ONE, f"me-{at}") for at in range(20)) + LIVE)
        for at in range(20):
            await until(lambda: running.agent.held, "a batch came")
            assert len(running.agent.held) == 1
            running.agent.answer(*running.agent.held.pop())
            assert (await answer_from(reader)).id == f"me-{at}"
        assert (await answer_from(reader)).status == 200


@pytest.mark.parametrize("sent", ["headers", "half a body", "all", "more"])
async def test_a_client_that_goes_away_holds_nothing_any_more(running: Stage, sent: str) -> None:
    running.agent.hold = True
    request = toy(np.ones((1000, 4), np.float32))
    cut = {"headers": request.index(b"\r\n\r\n") + 4, "half a body": len(request) - 8_000}
    capacity = running.gateway._pipeline.capacity
    async with connected(running) as (_, writer):
        writer.write(request * 2 if sent == "more" else request[: cut.get(sent, len(request))])
        if sent in cut:
            await until(lambda: capacity.requests == 1, "it is admitted")
        else:
            await running.scheduler.hear("submit")
    if sent not in cut:
        await running.scheduler.hear("cancel")
    await until(lambda: (capacity.requests, capacity.bytes) == (0, 0), "nothing is held")
    await until(lambda: not running.gateway._http._connections._open, "no connection is open")


async def test_a_body_that_does_not_come_ends_its_request(
    running: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_bodies, "SILENCE_S", 0.1)
    monkeypatch.setattr(http_connection, "LINGER_S", 0.1)
    async with connected(running) as (reader, writer):
        writer.write(toy(ONE)[:-1])
        assert (await answer_from(reader)).status == 504
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_a_connection_without_requests_is_closed_in_time(
    running: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "KEEPALIVE_S", 0.2)
    async with connected(running) as (reader, writer):
        writer.write(toy(ONE, "me") + toy(ONE)[:20])
        assert (await answer_from(reader)).id == "me"
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_a_gateway_that_stops_answers_first_what_it_can(running: Stage) -> None:
    async with connected(running) as (reader, writer), connected(running) as (idle, to_idle):
        to_idle.write(toy(ONE))
        await answer_from(idle)
        running.agent.hold = True
        writer.write(toy(ONE, "me"))
        await until(lambda: running.agent.held, "a batch came")
        closing = asyncio.create_task(running.gateway._http._connections.close(60.0))
        assert await asyncio.wait_for(idle.read(), 60) == b""
        running.agent.answer(*running.agent.held.pop())
        assert (await answer_from(reader)).id == "me"
        assert await asyncio.wait_for(reader.read(), 60) == b""
        await closing


async def test_what_is_not_answered_in_time_is_cancelled_when_a_gateway_stops(
    running: Stage,
) -> None:
    running.agent.hold = True
    async with connected(running) as (reader, writer):
        writer.write(toy(ONE))
        await until(lambda: running.agent.held, "a batch came")
        await running.gateway._http._connections.close(0.0)
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_large_bodies_come_over_tls_too(running: Stage, tmp_path: Path) -> None:
    files = Certificates(tmp_path / "certificates").files("gateway", "gateway-t")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["cert_file"], files["key_file"])

    def connection(settled: Callable[[], None]) -> asyncio.BaseProtocol:
        settled()
        return running.gateway._http._connections.connection()

    listener = TcpListener(connection, context)
    port = await listener.start("127.0.0.1", 0)
    trusting = ssl.create_default_context(cafile=str(files["ca_file"]))
    values = np.random.default_rng(0).standard_normal((1, 400_000)).astype(np.float32)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    for _ in range(2):
        writer.write(toy(values, path=INFER_FREE) + LIVE)
        assert np.array_equal((await answer_from(reader)).values, values.ravel())
        assert (await answer_from(reader)).status == 200
    writer.close()
    listener.close()
