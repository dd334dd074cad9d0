"""What is too large, too many or too slow for an endpoint is refused, and said so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from aiohttp import web

import catenary
from catenary_gateway.endpoints.connections.connection_watcher import ConnectionWatcher
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from gateway_harness import Stage, stage
from generation_harness import text_stage

ONE = {"in_0": np.ones((1, 4), np.float32)}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path) as found:
        yield found


async def test_an_id_too_long_to_be_kept_is_refused(running: Stage) -> None:
    async with catenary.AsyncClient(running.grpc) as client:
        with pytest.raises(catenary.InvalidInputError, match="at most 256"):
            await client.infer("toy", ONE, request_id="x" * 257)
        assert (await client.infer("toy", ONE, request_id="x" * 256)).id == "x" * 256
    tensor = {"name": "in_0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    async with (
        aiohttp.ClientSession(f"http://{running.http}") as session,
        session.post("/v2/models/toy/infer", json={"id": "x" * 257, "inputs": [tensor]}) as answer,
    ):
        assert answer.status == 400


async def test_metadata_beyond_its_limit_ends_the_call(running: Stage) -> None:
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        live = oip_grpc.GRPCInferenceServiceStub(channel).ServerLive
        small = (("x-padding", "x" * 8_000),)
        assert (await live(oip.ServerLiveRequest(), metadata=small)).live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await live(oip.ServerLiveRequest(), metadata=(("x-padding", "x" * 40_000),), timeout=5)
        assert caught.value.code() in {
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.CANCELLED,
        }
        assert (await live(oip.ServerLiveRequest(), timeout=5)).live


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"X-Long": "x" * 9_000}, 400), ({f"X-{n}": "x" for n in range(150)}, 400)],
)
async def test_headers_beyond_their_limits_are_refused(
    running: Stage, headers: dict[str, str], status: int
) -> None:
    async with (
        aiohttp.ClientSession(f"http://{running.http}", headers=headers) as session,
        session.get("/v2/health/live") as answer,
    ):
        assert answer.status == status


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"[" * 1024


async def test_a_body_too_large_for_its_route_is_refused_however_it_comes(running: Stage) -> None:
    async with aiohttp.ClientSession(f"http://{running.http}") as session:
        for body in (b"[" * 100_000, pieces(100)):
            async with session.post("/v2/repository/index", data=body) as answer:
                assert answer.status == 413
        async with session.post("/v2/repository/index", data=b"[" * 60_000) as answer:
            assert answer.status == 400


async def test_a_prompt_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with text_stage(tmp_path, max_prompt_bytes=20_000) as running:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "x" * 30_000}
        async with aiohttp.ClientSession(running.http) as session:
            async with session.post("/v1/completions", json=asked) as answer:
                assert answer.status == 413
            async with session.post("/v1/completions", data=pieces(40)) as answer:
                assert answer.status == 413
        async with catenary.AsyncClient(running.grpc) as client:
            with pytest.raises(catenary.PayloadTooLargeError):
                await client.generate("tiny", "x" * 30_000)
        assert running.scheduler.heard.empty() or not running.agent.frames


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("messages", {"messages": [{"role": "user", "content": "x"}] * 5_000}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 1_000_000}]}),
        (
            "chat_template_kwargs",
            {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {f"n{at}": 1 for at in range(40)},
            },
        ),
    ],
)
async def test_a_chat_beyond_its_limits_never_reaches_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr("catenary_gateway.generation.text.text_codec.TextCodec.render", None)
    async with (
        text_stage(tmp_path) as running,
        aiohttp.ClientSession(running.http) as session,
        session.post("/v1/chat/completions", json={"model": "tiny", **asked}) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == field


async def served(connections: ConnectionWatcher) -> tuple[web.AppRunner, int]:
    async def hello(request: web.Request) -> web.Response:
        connections.note_request(request.protocol)
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, int(runner.addresses[0][1])


async def opened(runner: web.AppRunner, count: int) -> list[Any]:
    assert runner.server is not None
    async with asyncio.timeout(30):
        while len(runner.server.connections) < count:
            await asyncio.sleep(0.005)
    return list(runner.server.connections)


async def test_a_connection_that_sends_no_request_is_closed_and_one_that_did_is_not() -> None:
    connections = ConnectionWatcher(first_request_s=15.0)
    runner, port = await served(connections)
    try:
        slow_in, slow_out = await asyncio.open_connection("127.0.0.1", port)
        good_in, good_out = await asyncio.open_connection("127.0.0.1", port)
        slow_out.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        good_out.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await good_in.readline()).startswith(b"HTTP/1.1 200")
        everybody = await opened(runner, 2)
        assert connections.look(everybody, 100.0) == 0
        assert connections.look(everybody, 114.0) == 0
        assert connections.look(everybody, 116.0) == 1
        assert await asyncio.wait_for(slow_in.read(), 30) == b""
        good_out.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.wait_for(good_in.readuntil(b"HTTP/1.1 200"), 30)
        slow_out.close()
        good_out.close()
    finally:
        await runner.cleanup()


async def test_beyond_the_most_connections_the_youngest_silent_ones_are_closed() -> None:
    connections = ConnectionWatcher(most=2)
    runner, port = await served(connections)
    try:
        streams = []
        for at in range(4):
            streams.append(await asyncio.open_connection("127.0.0.1", port))
            connections.look(await opened(runner, at + 1), float(at)) if at < 2 else None
        assert connections.look(await opened(runner, 4), 4.0) == 2
        for reader, _ in streams[2:]:
            assert await asyncio.wait_for(reader.read(), 30) == b""
        streams[0][1].write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await streams[0][0].readline()).startswith(b"HTTP/1.1 200")
        for _, writer in streams:
            writer.close()
    finally:
        await runner.cleanup()
