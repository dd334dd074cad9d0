"""Calls as clients of gRPC make them, with each of its stubs, and over TLS."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.errors import CatenaryError, QuotaExceeded, Unauthenticated
from catenary_services.grpc.error_tables import abort
from catenary_services.grpc.grpc_kit import bind, create_server
from catenary_services.grpc.server import call
from catenary_services.grpc.server.request_head import RequestHead, head_of
from catenary_services.grpc.server.response_blocks import trailers_block
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.http2 import frames
from catenary_services.http2.header_blocks import HeaderDecoder
from catenary_services.http2.limits import ConnectionLimits
from catenary_services.security.tls import ServerSecurity
from certificates import Certificates
from shared_helpers.raw_http2 import RawClient, data, opening, prefixed
from shared_helpers.waiting import until

OPEN = ServerSecurity(insecure=True)
MIB = 1 << 20
Answer = Callable[[Any, Any], Any]


class Service(grpc.GenericRpcHandler):
    """Methods of all four kinds."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.cancelled = 0
        self.kinds: dict[str, Any] = {
            "Say": grpc.unary_unary_rpc_method_handler(self.say),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Sum": grpc.stream_unary_rpc_method_handler(self.sum),
            "Talk": grpc.stream_stream_rpc_method_handler(self.talk),
            "Wait": grpc.unary_unary_rpc_method_handler(self.wait),
            "Stall": grpc.unary_stream_rpc_method_handler(self.stall),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Refuse": grpc.unary_unary_rpc_method_handler(self.refuse),
            "Set": grpc.unary_unary_rpc_method_handler(self.set),
            "Tell": grpc.unary_unary_rpc_method_handler(self.tell),
            "Plain": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
            "Late": grpc.stream_stream_rpc_method_handler(self.late),
        }

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self.kinds.get(details.method.rpartition("/")[2])

    async def say(self, request: bytes, _: Any) -> bytes:
        return request

    async def count(self, request: bytes, _: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield str(number).encode()

    async def sum(self, requests: AsyncIterator[bytes], _: Any) -> bytes:
        return str(sum([int(request) async for request in requests])).encode()

    async def talk(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def wait(self, request: bytes, context: Any) -> bytes:
        self.told.append(context)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return request

    async def stall(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        await self.wait(request, context)

    async def fail(self, request: bytes, _: Any) -> bytes:
        raise ValueError("a secret")

    async def refuse(self, request: bytes, context: Any) -> None:
        await abort(context, QuotaExceeded("zu viel: 5 % über Maß", retry_after_ns=1_500_000_000))

    async def set(self, request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.FAILED_PRECONDITION)
        context.set_details("not yet")
        return b"nobody sees this"

    async def tell(self, request: bytes, context: Any) -> bytes:
        self.told.append(context)
        context.set_trailing_metadata((("after", "a"), ("after-bin", b"\0\1")))
        await context.send_initial_metadata((("before", "b"), ("before-bin", b"\2\3")))
        return repr((context.peer(), context.time_remaining() is None)).encode()

    async def late(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await asyncio.sleep(0.2)
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(request)


@asynccontextmanager
async def served(**more: Any) -> AsyncIterator[tuple[str, Service, GrpcServer]]:
    server, service = create_server(OPEN, **more), Service()
    server.add_generic_rpc_handlers((service,))
    port = bind(server, "127.0.0.1", 0, OPEN)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", service, server
    finally:
        await server.stop(0)


@pytest.fixture
async def place() -> AsyncIterator[tuple[grpc.aio.Channel, Service, GrpcServer]]:
    async with served() as (target, service, server), grpc.aio.insecure_channel(target) as channel:
        yield channel, service, server


Place = tuple[grpc.aio.Channel, Service, GrpcServer]


@pytest.mark.parametrize("size", [0, 1, 16_379, 65_530, 65_531, 3 * MIB])
async def test_messages_of_any_size_come_and_go(place: Place, size: int) -> None:
    message = os.urandom(size)
    for method in ("Say", "Plain"):
        assert await place[0].unary_unary(f"/t.T/{method}")(message, timeout=30) == message
    stream = place[0].stream_stream("/t.T/Talk")(timeout=30)
    for _ in range(3):
        await stream.write(message)
        assert await stream.read() == message
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_calls_of_all_kinds_are_served(place: Place) -> None:
    channel, _, server = place
    counted = [each async for each in channel.unary_stream("/t.T/Count")(b"100", timeout=30)]
    assert counted == [str(number).encode() for number in range(100)]
    summed = channel.stream_unary("/t.T/Sum")(iter([b"1", b"2", b"39"]), timeout=30)
    assert await summed == b"42"
    many = [channel.unary_unary("/t.T/Say")(b"x" * size, timeout=30) for size in range(300)]
    assert [len(each) for each in await asyncio.gather(*many)] == list(range(300))
    assert server.calls == 0


async def test_a_client_of_threads_is_served() -> None:
    async with served() as (target, _, _server):

        def call() -> tuple[list[bytes], bytes]:
            with grpc.insecure_channel(target) as channel:
                said = channel.unary_unary("/t.T/Say").future(b"hello", timeout=30).result()
                return list(channel.stream_stream("/t.T/Talk")(iter([b"a", b"b"]))), said

        assert await asyncio.to_thread(call) == ([b"a", b"b"], b"hello")


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_inflated_within_bounds(algorithm: grpc.Compression) -> None:
    async with (
        served(max_message_bytes=MIB) as (target, _, _server),
        grpc.aio.insecure_channel(target) as channel,
    ):
        call = channel.unary_unary("/t.T/Say")
        message = b"x" * (MIB - 1)
        assert await call(message, compression=algorithm, timeout=30) == message
        with pytest.raises(grpc.aio.AioRpcError, match="unpacks to more than") as caught:
            await call(bytes(2 * MIB), compression=algorithm, timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("headers", "message", "status"),
    [
        ((("grpc-encoding", "snappy"),), b"\1\0\0\0\1x", 12),
        ((), b"\1\0\0\0\1x", 3),
        ((("grpc-encoding", "gzip"),), b"\1\0\0\0\1x", 3),
        ((), b"\2\0\0\0\1x", 3),
        ((), b"\0\0\0\0\2x", 3),
        ((), b"\0\0", 3),
        ((), b"", 3),
        ((("grpc-timeout", "soon"),), b"\0\0\0\0\1x", 13),
        ((("x-bin", "*"),), b"\0\0\0\0\1x", 13),
    ],
)
async def test_calls_that_are_no_good_are_told_why(
    headers: tuple[tuple[str, str], ...], message: bytes, status: int
) -> None:
    async with served() as (target, _, _server):
        client = await RawClient.connect(int(target.rpartition(":")[2]))
        client.send(opening(1, "/t.T/Say", *headers), data(1, message, ends=True))
        answer = await client.next_of(frames.HEADERS)
        assert answer is not None
        assert b"grpc-status" + bytes([len(str(status))]) + str(status).encode() in answer.payload
        client.close()


async def test_an_unknown_method_is_unimplemented(place: Place) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await place[0].unary_unary("/t.T/Nowhere")(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_method_that_a_servicer_does_not_have_is_unimplemented() -> None:
    server = create_server(OPEN)
    health_pb2_grpc.add_HealthServicer_to_server(health_pb2_grpc.HealthServicer(), server)
    port = bind(server, "127.0.0.1", 0, OPEN)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for call in (stub.Check, stub.List):
            with pytest.raises(grpc.aio.AioRpcError, match="not implemented") as caught:
                await call(request_of(call), timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)


def request_of(call: Any) -> Any:
    from grpc_health.v1 import health_pb2

    is_list = b"List" in call._method
    return health_pb2.HealthListRequest() if is_list else health_pb2.HealthCheckRequest()


async def test_errors_carry_message_details_and_push_back(place: Place) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await place[0].unary_unary("/t.T/Refuse")(b"", timeout=30)
    error = caught.value
    assert error.details() == "zu viel: 5 % über Maß"
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert any(each.Unpack(info) for each in status.details)
    assert info.reason == "QUOTA_EXCEEDED"
    assert trailers["grpc-retry-pushback-ms"] == "1500"


async def test_a_handler_that_fails_tells_nothing_of_it(place: Place) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await place[0].unary_unary("/t.T/Fail")(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert "secret" not in (caught.value.details() or "")


async def test_an_authorizer_that_fails_lets_nobody_in_and_harms_no_other_call(
    place: Place,
) -> None:
    channel, service, server = place
    waiting = channel.unary_unary("/t.T/Wait")(b"")
    await until(lambda: service.told)
    authorizer, server.call_authorizer = server.call_authorizer, None  # type: ignore[assignment]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/t.T/Say")(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    server.call_authorizer = authorizer
    assert not waiting.done()
    waiting.cancel()


class Nobody:
    """An authorizer that admits no call."""

    def enter(self, method: str, context: Any, peer: str) -> str:
        raise Unauthenticated("who are you?")

    def refused(self, method: str, context: Any, error: CatenaryError) -> None:
        raise AssertionError("nobody was admitted")


@pytest.mark.parametrize("last", [False, True])
async def test_a_refused_stream_ends_when_its_first_message_begins(
    monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """Clients of gRPC for Python call it an internal error if they cannot write the message."""
    monkeypatch.setattr(call, "_REFUSED_S", 60.0)
    async with served() as (target, _, server):
        server.call_authorizer = Nobody()
        client = await RawClient.connect(int(target.rpartition(":")[2]))
        client.send(opening(1, "/t.T/Talk"), frames.frame(frames.PING, 0, 0, bytes(8)))
        told = await client.next_of(frames.HEADERS, frames.PING)
        assert told is not None
        assert told.kind == frames.PING
        client.send(data(1, b"" if last else prefixed(b"a"), ends=last))
        answer = await client.next_of(frames.HEADERS)
        assert answer is not None
        assert b"grpc-status\x0216" in answer.payload
        client.close()


@pytest.mark.parametrize("ends", [False, True])
async def test_a_refused_stream_without_a_message_ends_soon(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(call, "_REFUSED_S", 60.0 if ends else 0.01)
    async with served() as (target, _, server):
        server.call_authorizer = Nobody()
        client = await RawClient.connect(int(target.rpartition(":")[2]))
        client.send(opening(1, "/t.T/Talk", ends=ends))
        answer = await client.next_of(frames.HEADERS)
        assert answer is not None
        assert b"grpc-status\x0216" in answer.payload
        client.close()


async def test_a_status_that_was_set_is_sent(place: Place) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="not yet") as caught:
        await place[0].unary_unary("/t.T/Set")(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_metadata_goes_both_ways(place: Place) -> None:
    channel, service, _ = place
    sent = (("key", "value"), ("key", "again"), ("raw-bin", b"\0\xff,"), ("empty", ""))
    call = channel.unary_unary("/t.T/Tell")(b"", metadata=sent)
    assert b"('ipv4:127.0.0.1:" in await call
    heard = tuple(service.told[0].invocation_metadata())
    assert set(sent) <= set(heard)
    assert not {key for key, _ in heard} & {"te", "content-type", "grpc-timeout", ":path"}
    assert {("before", "b"), ("before-bin", b"\2\3")} <= set(await call.initial_metadata())
    assert set(await call.trailing_metadata()) == {("after", "a"), ("after-bin", b"\0\1")}


async def test_a_deadline_reaches_the_handler_and_ends_it(place: Place) -> None:
    channel, service, server = place
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/t.T/Wait")(b"", timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: service.cancelled == 1 and server.calls == 0)
    assert service.told[0].time_remaining() < 0.5


async def test_the_server_keeps_a_deadline_that_its_caller_forgets() -> None:
    async with served() as (target, service, server):
        client = await RawClient.connect(int(target.rpartition(":")[2]))
        begun = opening(1, "/t.T/Wait", ("grpc-timeout", "200m"))
        client.send(begun, data(1, prefixed(b""), ends=True))
        answer = await client.next_of(frames.HEADERS)
        assert answer is not None
        assert b"grpc-status\x014" in answer.payload
        await until(lambda: service.cancelled == 1 and server.calls == 0)
        client.close()


async def test_a_cancelled_call_ends_its_handler(place: Place) -> None:
    channel, service, server = place
    stubs = channel.unary_unary("/t.T/Wait"), channel.unary_stream("/t.T/Stall")
    for before, stub in enumerate(stubs):
        call = stub(b"")
        await until(lambda: server.calls == 1)
        if isinstance(call, grpc.aio.UnaryStreamCall):
            assert await call.read() == b"first"
        await until(lambda before=before: len(service.told) > before)
        call.cancel()
        await until(lambda before=before: service.cancelled == before + 1 and server.calls == 0)
        assert service.told[-1].cancelled()
        assert service.told[-1].done()


async def test_messages_that_wait_for_the_handler_are_bounded_and_arrive() -> None:
    async with (
        served(limits=ConnectionLimits(first_window=65_535)) as (target, _, _server),
        grpc.aio.insecure_channel(target) as channel,
    ):
        stream = channel.stream_stream("/t.T/Late")(timeout=60)
        messages = [os.urandom(size) for size in (0, 10, 70_000, 5, 200_000, 1)]

        async def write() -> None:
            for message in messages:
                await stream.write(message)
            await stream.done_writing()

        writing = asyncio.create_task(write())
        assert [each async for each in stream] == messages
        await writing


async def test_a_server_that_stops_lets_calls_end_and_then_ends_them() -> None:
    async with served() as (target, service, server), grpc.aio.insecure_channel(target) as channel:
        stream = channel.stream_stream("/t.T/Talk")()
        await stream.write(b"x")
        assert await stream.read() == b"x"
        waiting = channel.unary_unary("/t.T/Wait")(b"")
        await until(lambda: service.told)
        stopping = asyncio.create_task(server.stop(1.0))
        await asyncio.sleep(0.05)
        await stream.write(b"still")
        assert await stream.read() == b"still"
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK
        await stopping
        assert service.cancelled == 1
        assert await waiting.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert server.connections == 0


async def test_calls_beyond_the_number_are_refused() -> None:
    async with (
        served(most_calls=1) as (target, service, _),
        grpc.aio.insecure_channel(target) as channel,
    ):
        first = channel.unary_unary("/t.T/Wait")(b"")
        await until(lambda: service.told)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Say")(b"", timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


async def test_an_answer_larger_than_may_be_sent_is_an_error() -> None:
    async with (
        served(max_message_bytes=1000) as (target, service, _),
        grpc.aio.insecure_channel(target) as channel,
    ):
        service.kinds["Large"] = grpc.unary_unary_rpc_method_handler(lambda *_: bytes(1001))
        with pytest.raises(grpc.aio.AioRpcError, match="more than may be sent"):
            await channel.unary_unary("/t.T/Large")(b"", timeout=30)


async def test_over_mutual_tls_the_handler_knows_the_caller(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    security = certificates.server("scheduler", "s")
    server, service = create_server(security), Service()
    server.add_generic_rpc_handlers((service,))
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    credentials = certificates.client("agent", "a-1").channel_credentials()
    assert credentials is not None
    options = [("grpc.ssl_target_name_override", "localhost")]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        message = os.urandom(MIB)
        assert await channel.unary_unary("/t.T/Say")(message, timeout=30) == message
        await channel.unary_unary("/t.T/Tell")(b"", timeout=30)
    context = service.told[0].auth_context()
    assert context["peer_spiffe_id"] == [b"spiffe://catenary/main/agent/a-1"]
    assert context["transport_security_type"] == [b"ssl"]
    await server.stop(0)


async def test_calls_that_are_over_need_no_garbage_collector(place: Place) -> None:
    channel, service, _ = place
    gone: list[weakref.ref[Any]] = []

    async def look(request: bytes, context: Any) -> bytes:
        gone.append(weakref.ref(context._call.task))
        return request

    service.kinds["Look"] = grpc.unary_unary_rpc_method_handler(look)
    gc.disable()
    try:
        for _ in range(3):
            await channel.unary_unary("/t.T/Look")(b"", timeout=30)
        await until(lambda: all(each() is None for each in gone))
    finally:
        gc.enable()


@given(st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=8)), max_size=8))
def test_any_headers_are_read_or_refused(more: list[tuple[bytes, bytes]]) -> None:
    begin = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b")]
    head = head_of([*begin, *more])
    if isinstance(head, RequestHead):
        assert head.path == "/a/b"
        for _, value in head.metadata:
            assert isinstance(value, bytes) or value.isprintable()


@given(st.text(max_size=60), st.binary(max_size=60), st.text(max_size=30))
def test_whatever_a_status_says_can_be_read(message: str, raw: bytes, text: str) -> None:
    block = trailers_block(grpc.StatusCode.ABORTED, message, (("a-bin", raw), ("b", text)))
    found = dict(HeaderDecoder(lambda headers: headers, 1 << 16).decode(block))
    assert found[b"grpc-status"] == b"10"
    for value in found.values():
        assert all(0x20 <= each < 0x7F for each in value)
