"""What plays the load of `benchmarks.peers`: programs in C, and the player without them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from aiohttp import web

from benchmarks.peers.load import (
    GENERATORS,
    Load,
    LoadFailedError,
    Outcome,
    chosen,
    of_h2load,
    of_lines,
)
from benchmarks.peers.player import play
from benchmarks.peers.player_http2 import header_block
from benchmarks.peers.requests import GRPC_PATH, Request

REPORT = """\
finished in 973.40ms, 1027.33 req/s, 334.95KB/s
requests: 4 total, 4 started, 4 done, {succeeded} succeeded, {failed} failed, 0 errored, 0 timeout
status codes: {succeeded} 2xx, 0 3xx, 0 4xx, {failed} 5xx
traffic: 326.04KB (333865) total, 3.22KB (3300) headers (space savings 95.93%), 1.13KB ({data}) data
                     min         max         mean         sd        +/- sd
"""
TIMES = "1000000\t200\t13000\n1000500\t200\t2000\n1002500\t200\t1000\n1003500\t200\t996500\n"


def test_h2loads_report_and_times_are_read() -> None:
    printed = REPORT.format(succeeded=4, failed=0, data=4 * 289)
    found = of_h2load(printed, TIMES, range(289, 290))
    assert (found.answers, found.failed, found.seconds) == (4, 0, 1.0)
    assert found.p50_ms == pytest.approx(7.5)
    assert 900 < found.p99_ms < 996.5


@pytest.mark.parametrize(
    ("succeeded", "data", "failed"),
    [(3, 3 * 289, 1), (4, 3 * 289, 1), (4, 0, 4), (2, 4 * 289, 2)],
    ids=["status", "a gRPC failure without a message", "only failures", "long pages of errors"],
)
def test_failures_are_counted_by_status_and_by_bytes(
    succeeded: int, data: int, failed: int
) -> None:
    printed = REPORT.format(succeeded=succeeded, failed=4 - succeeded, data=data)
    assert of_h2load(printed, TIMES, range(289, 290)).failed == failed


def test_a_report_of_nothing_is_an_error() -> None:
    with pytest.raises(LoadFailedError, match="h2load reports no requests"):
        of_h2load("finished in 0s", TIMES, range(1, 2))
    with pytest.raises(LoadFailedError, match="h2load reports no requests"):
        of_h2load(REPORT.format(succeeded=4, failed=0, data=4), "", range(1, 2))


def test_the_last_line_that_wrk_or_the_player_prints_is_the_outcome() -> None:
    line = '{"answers": 7, "failed": 1, "seconds": 2.5, "p50_ms": 1.5, "p99_ms": 3.0}'
    assert of_lines(f"Running 2s test\n  7 requests\n\n{line}\n") == Outcome(7, 1, 2.5, 1.5, 3.0)
    with pytest.raises(LoadFailedError, match="no outcome"):
        of_lines("unable to connect")
    with pytest.raises(LoadFailedError, match="no answer"):
        of_lines(line.replace("7", "0"))


def test_without_programs_in_c_the_player_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"h2load", "wrk"}
    monkeypatch.setattr(shutil, "which", lambda name: name if name in here else None)
    assert (chosen("grpc"), chosen("http")) == ("h2load", "h2load")
    here.remove("h2load")
    assert (chosen("grpc"), chosen("http")) == ("player", "wrk")
    here.clear()
    assert (chosen("grpc"), chosen("http")) == ("player", "player")


def test_headers_are_literals_with_lengths_as_hpack_writes_them() -> None:
    assert header_block({"te": "trailers"}) == b"\0\x02te\x08trailers"
    long = header_block({"a": "v" * 127})
    assert long[:5] == b"\0\x01a\x7f\x00"
    assert header_block({"a": "v" * 300})[:6] == b"\0\x01a\x7f\xad\x01"


BODY = bytes(range(256)) * 2400  # 600 KiB: more than a window of HTTP/2
REQUEST = Request("bytes", "/", BODY, {"content-type": "application/octet-stream"}, lambda *_: None)  # type: ignore[arg-type, return-value]
CALL = Request(
    "bytes",
    GRPC_PATH,
    b"\0" + len(BODY).to_bytes(4, "big") + BODY,
    {"content-type": "application/grpc", "te": "trailers"},
    lambda *_: None,  # type: ignore[arg-type, return-value]
)


@asynccontextmanager
async def http_server(every_failure: int, *, chunked: bool = False) -> AsyncIterator[int]:
    """A server that answers with the body's length, and every so many requests with 503."""
    served = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal served
        served += 1
        text = f"{len(await request.read()):08d}"
        response = web.Response(text=text, status=200 if served % every_failure else 503)
        if chunked:
            response.enable_chunked_encoding()
        return response

    application = web.Application(client_max_size=2**24)
    application.router.add_post("/", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def grpc_server(every_failure: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A server that gives 100 bytes, and every so many calls a status; with the sizes it got."""
    sizes: list[int] = []

    async def infer(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        sizes.append(len(message))
        if len(sizes) % every_failure == 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        return b"x" * 100

    server = grpc.aio.server()
    service, method = GRPC_PATH.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port, sizes
    finally:
        await server.stop(0)


def document(load: Load) -> dict[str, object]:
    return {
        "protocol": load.protocol,
        "port": load.port,
        "path": load.request.path,
        "headers": load.request.headers,
        "connections": load.connections,
        "count": load.count,
        "least_bytes": load.answer_bytes[0],
    }


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_player_counts_answers_and_failures_over_http(chunked: bool) -> None:
    async with http_server(5, chunked=chunked) as port:
        load = Load("http", port, REQUEST, 4, 40, 1.0, range(8, 9))
        found = await play(document(load), BODY)
    assert (found["answers"], found["failed"]) == (40, 8)
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["seconds"] * 1e3


async def test_the_player_counts_answers_and_failures_over_grpc() -> None:
    async with grpc_server(5) as (port, sizes):
        load = Load("grpc", port, CALL, 4, 40, 1.0, range(105, 106))
        found = await play(document(load), CALL.body)
    assert (found["answers"], found["failed"]) == (40, 8)
    assert sizes == [len(BODY)] * 40


async def test_the_player_goes_on_after_a_connection_that_breaks() -> None:
    broken = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal broken
        with contextlib.suppress(asyncio.IncompleteReadError):  # the player has left
            await answer_nothing(reader)
            broken += 1
        writer.close()

    async def answer_nothing(reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(size)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        load = Load("http", port, REQUEST, 2, 6, 1.0, range(8, 9))
        found = await play(document(load), BODY)
    assert (found["answers"], found["failed"], broken) == (6, 6, 6)


@pytest.mark.parametrize("name", GENERATORS)
async def test_every_generator_plays_http(name: str) -> None:
    if name != "player" and shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    async with http_server(10**9) as port:
        load = Load("http", port, REQUEST, 2, 20, 1.0, range(8, 9))
        found = await asyncio.to_thread(GENERATORS[name], load)
    assert found.failed == 0
    assert found.answers == 20 or name == "wrk"  # which is told a time


@pytest.mark.parametrize("name", ["h2load", "player"])
async def test_generators_see_that_calls_fail(name: str) -> None:
    if name != "player" and shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    async with grpc_server(5) as (port, sizes):
        load = Load("grpc", port, CALL, 2, 20, 1.0, range(105, 106))
        found = await asyncio.to_thread(GENERATORS[name], load)
    assert (found.answers, found.failed) == (20, 4)
    assert sizes == [len(BODY)] * 20
