"""A server against peers that keep to no rule, over real sockets; an honest caller beside them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from catenary_services.grpc.grpc_kit import bind, create_server, open_channel
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.http2 import frames
from catenary_services.http2.frames import END_HEADERS, PREFACE, frame, settings_frame, window_frame
from catenary_services.http2.held_memory import surplus
from catenary_services.http2.limits import ConnectionLimits
from catenary_services.http2.protocol import ConnectionProtocol
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.tcp_listener import ListenerLimits
from certificates import Certificates
from shared_helpers.raw_http2 import RawClient, call_headers, data, opening, prefixed
from shared_helpers.waiting import until

OPEN = ServerSecurity(insecure=True)
MIB = 1 << 20
ENOUGH = (frames.ENHANCE_YOUR_CALM, None)
"""How a flood ends: who goes on sending while the connection is closed may miss the reason."""


class Service(grpc.GenericRpcHandler):
    """Echoes, answers at length, and waits."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.written = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "Much":
            return grpc.unary_stream_rpc_method_handler(self.much)
        if method == "Large":
            return grpc.unary_unary_rpc_method_handler(self.large)
        return grpc.unary_unary_rpc_method_handler(self.wait if method == "Wait" else self.say)

    async def say(self, request: bytes, _: Any) -> bytes:
        return request

    async def large(self, request: bytes, _: Any) -> bytes:
        return bytes(int(request))

    async def wait(self, request: bytes, _: Any) -> bytes:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1
        return request

    async def much(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield bytes(MIB)
            self.written += 1


@asynccontextmanager
async def served(
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008
    most_connections: int | None = None,
) -> AsyncIterator[tuple[int, Service, GrpcServer]]:
    server = create_server(OPEN, limits=limits)
    if most_connections is not None:
        server.most_connections = most_connections
    service = Service()
    server.add_generic_rpc_handlers((service,))
    port = bind(server, "127.0.0.1", 0, OPEN)
    await server.start()
    try:
        yield port, service, server
        async with open_channel(f"127.0.0.1:{port}", ClientSecurity(insecure=True)) as channel:
            # Whatever happened, others are served.
            assert await channel.unary_unary("/t.T/Say")(b"there?", timeout=60) == b"there?"
    finally:
        await server.stop(0)


async def test_rapid_resets_end_the_connection_and_leave_nothing_running() -> None:
    async with served() as (port, service, server):
        client = await RawClient.connect(port)
        for number in range(1, 6_000, 2):
            client.send(
                opening(number, "/t.T/Wait"),
                data(number, prefixed(b"x"), ends=True),
                frame(frames.RST_STREAM, 0, number, (8).to_bytes(4, "big")),
            )
        assert await client.farewell() in ENOUGH
        await until(lambda: server.calls == 0)
        assert service.begun == service.ended


async def test_a_flood_of_continuations_ends_the_connection() -> None:
    async with served() as (port, _, _server):
        client = await RawClient.connect(port)
        client.send(frame(frames.HEADERS, 0, 1, call_headers("/t.T/Say")))
        client.send(*(frame(frames.CONTINUATION, 0, 1, b"") for _ in range(50)))
        assert await client.farewell() in ENOUGH


@pytest.mark.parametrize("size", [17_000, 30_000])
async def test_large_headers_end_their_call(size: int) -> None:
    async with served() as (port, _, _server):
        client = await RawClient.connect(port)
        block = call_headers("/t.T/Say", ("x", "y" * size))
        client.send(frame(frames.HEADERS, 0, 1, block[:16_000]))
        parts = [block[at : at + 16_000] for at in range(16_000, len(block), 16_000)]
        for at, part in enumerate(parts, 1):
            flags = END_HEADERS if at == len(parts) else 0
            client.send(frame(frames.CONTINUATION, flags, 1, part))
        answer = await client.next_of(frames.HEADERS, frames.GOAWAY)
        assert answer is not None
        assert b"grpc-status\x018" in answer.payload  # RESOURCE_EXHAUSTED
        client.close()


async def test_huge_headers_end_the_connection() -> None:
    async with served() as (port, _, _server):
        client = await RawClient.connect(port)
        client.send(frame(frames.HEADERS, 0, 1, bytes(16_000)))
        client.send(*(frame(frames.CONTINUATION, 0, 1, bytes(16_000)) for _ in range(6)))
        assert await client.farewell() in ENOUGH


@pytest.mark.parametrize(
    "flood",
    [
        settings_frame({frames.INITIAL_WINDOW_SIZE: 1}),
        frame(frames.PING, 0, 0, bytes(8)),
        frame(frames.PRIORITY, 0, 1, bytes(5)),
        frame(99, 0, 0),
    ],
)
async def test_floods_of_frames_end_the_connection(flood: bytes) -> None:
    async with served() as (port, _, _server):
        client = await RawClient.connect(port)
        client.send(*(flood for _ in range(30_000)))
        assert await client.farewell() in ENOUGH


async def test_pings_that_come_too_often_are_told_so() -> None:
    async with served() as (port, _, _server):
        client = await RawClient.connect(port)
        client.send(*(frame(frames.PING, 0, 0, bytes(8)) for _ in range(5)))
        farewell = await client.next_of(frames.GOAWAY)
        assert farewell is not None
        assert farewell.payload[8:] == b"too_many_pings"


async def test_who_takes_nothing_holds_back_the_handler_and_is_given_up() -> None:
    async with served(ConnectionLimits(stalled_s=0.5)) as (port, service, server):
        client = await RawClient.connect(port, PREFACE + settings_frame({4: 0}))
        client.send(opening(1, "/t.T/Much"), data(1, prefixed(b"x"), ends=True))
        reset = await client.next_of(frames.RST_STREAM)
        assert reset is not None
        assert reset.code == frames.CANCEL
        assert service.written <= 1
        await until(lambda: server.calls == 0)
        client.close()


async def test_who_reads_nothing_is_given_up_and_costs_little() -> None:
    async with served(ConnectionLimits(stalled_s=0.5)) as (port, service, server):
        wide = settings_frame({frames.INITIAL_WINDOW_SIZE: 0x7FFF_FFFF})
        client = await RawClient.connect(port, PREFACE + wide + window_frame(0, 1 << 30))
        client.send(opening(1, "/t.T/Much"), data(1, prefixed(b"x"), ends=True))
        await until(lambda: server.calls == 1)
        await until(lambda: server.calls == 0)  # nobody has read a byte
        assert service.written < 64  # what the sockets of this machine hold
        client.close()


async def test_answers_that_nobody_takes_keep_further_calls_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("catenary_services.http2.connection.QUEUED_BYTES", MIB)
    async with served() as (port, _, _server):
        client = await RawClient.connect(port, PREFACE + settings_frame({4: 0}))
        for number in (1, 3):
            client.send(
                opening(number, "/t.T/Large"), data(number, prefixed(b"1000000"), ends=True)
            )
            assert await client.next_of(frames.HEADERS) is not None
        client.send(opening(5, "/t.T/Large"), data(5, prefixed(b"1"), ends=True))
        reset = await client.next_of(frames.RST_STREAM)
        assert reset is not None
        assert (reset.number, reset.code) == (5, frames.REFUSED_STREAM)
        client.close()


async def test_calls_of_one_source_beyond_a_number_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("catenary_services.grpc.server.server.MOST_CALLS_OF_ONE_SOURCE", 3)
    async with served() as (port, _, server):
        clients = [await RawClient.connect(port) for _ in range(2)]
        for client in clients:
            client.send(*(opening(number, "/t.T/Wait") for number in (1, 3)))
        answers = [await client.next_of(frames.HEADERS) for client in clients[1:]]
        assert answers[0] is not None
        assert b"grpc-status\x018" in answers[0].payload  # RESOURCE_EXHAUSTED
        for client in clients:
            client.close()
        await until(lambda: server.calls == 0)
        assert server.calls_of("ipv4:127.0.0.1") == 0


NOTED = b"".join(b"\x40\2%02d\0" % at for at in range(100))
"""Headers for the table of a connection, where they take as much as the 16,000 bytes."""
HOLDING = {
    "unfinished headers": frame(frames.HEADERS, 0, 1, bytes(16_000)),
    "noted headers": frame(frames.HEADERS, END_HEADERS, 1, call_headers("/t.T/No") + NOTED),
}


@pytest.mark.parametrize("name", HOLDING)
async def test_connections_that_hold_much_together_end_and_no_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as (port, _, server):
        quiet = await RawClient.connect(port)
        clients = [await RawClient.connect(port) for _ in range(3)]
        await until(lambda: server.connections == 4)
        for client in clients:
            client.send(HOLDING[name])
        few = partial(surplus, most_bytes=20_000)
        monkeypatch.setattr("catenary_services.grpc.server.server.surplus", few)
        await until(lambda: server.connections == 2)
        quiet.send(opening(1, "/t.T/Say"), data(1, prefixed(b"x"), ends=True))
        assert await quiet.next_of(frames.HEADERS) is not None
        for client in (*clients, quiet):
            client.close()


async def test_who_begins_much_at_once_is_looked_for_before_it_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "catenary_services.grpc.server.server"
    monkeypatch.setattr(f"{place}.surplus", partial(surplus, most_bytes=20_000))
    monkeypatch.setattr(f"{place}.LOOKED_FOR_AFTER", 40_000)
    monkeypatch.setattr(f"{place}._LOOK_S", 3_600.0)
    async with served() as (port, _, server):
        clients = [await RawClient.connect(port) for _ in range(3)]
        await until(lambda: server.connections == 3)
        for client in clients:
            client.send(frame(frames.HEADERS, 0, 1, bytes(16_000)))
        await until(lambda: server.connections == 1)
        for client in clients:
            client.close()


async def test_a_thousand_calls_at_once_are_all_answered_and_others_between_them() -> None:
    async with served() as (port, _, server):
        many, one = [await RawClient.connect(port) for _ in range(2)]
        await until(lambda: server.connections == 2)
        for number in range(1, 2_000, 2):
            many.send(opening(number, "/t.T/Say"), data(number, prefixed(b"x"), ends=True))
        one.send(opening(1, "/t.T/Say"), data(1, prefixed(b"x"), ends=True))
        assert await one.next_of(frames.DATA) is not None
        answered = 0
        while answered < 1_000:
            answer = await many.next_of(frames.HEADERS)
            assert answer is not None
            answered += bool(answer.flags & frames.END_STREAM)
        for client in (many, one):
            client.close()


async def test_a_call_is_answered_between_long_headers_of_many_connections() -> None:
    """All of them come in one turn of the loop; each refers 400 times to what it had noted."""
    noting = call_headers("/t.T/Say") + b"\x40\1x\0"
    long = call_headers("/t.T/Wait") + b"\xbe" * 400
    async with served() as (port, service, _):
        many = [await RawClient.connect(port) for _ in range(60)]
        one = await RawClient.connect(port)
        for client in (*many, one):
            client.send(frame(frames.HEADERS, END_HEADERS, 1, noting))
            client.send(data(1, prefixed(b"x"), ends=True))
            assert await client.next_of(frames.DATA) is not None
        for client in many:
            client.send(frame(frames.HEADERS, END_HEADERS, 3, long))
            client.send(data(3, prefixed(b"x"), ends=True))
        one.send(opening(3, "/t.T/Say"), data(3, prefixed(b"x"), ends=True))
        assert await one.next_of(frames.DATA) is not None
        assert service.begun < len(many)
        await until(lambda: service.begun == len(many))
        for client in (*many, one):
            client.close()


async def test_who_is_ended_while_it_waits_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "catenary_services.grpc.server.server"
    monkeypatch.setattr(f"{place}.surplus", partial(surplus, most_bytes=10_000))
    monkeypatch.setattr(f"{place}.LOOKED_FOR_AFTER", 20_000)
    turns_of_lost = []
    take_turn = ConnectionProtocol.take_turn

    def noted(protocol: ConnectionProtocol[Any]) -> None:
        turns_of_lost.append(protocol.transport is None)
        take_turn(protocol)

    monkeypatch.setattr(ConnectionProtocol, "take_turn", noted)
    async with served() as (port, _, server):
        clients = [await RawClient.connect(port) for _ in range(60)]
        await until(lambda: server.connections == 60)
        for client in clients:
            client.send(opening(1, "/t.T/Say", ("x", "y" * 1_000)))
        await until(lambda: server.connections < 60)
        await until(lambda: bool(turns_of_lost))
        for client in clients:
            client.close()
        await until(lambda: server.connections == 0)
    assert not any(turns_of_lost)


async def test_silence_before_the_first_call_ends_the_connection() -> None:
    async with served(ConnectionLimits(first_stream_s=0.3)) as (port, _, _server):
        client = await RawClient.connect(port)
        assert await client.farewell() == frames.NO_ERROR


async def test_silence_after_the_last_call_ends_the_connection() -> None:
    async with served(ConnectionLimits(idle_s=0.3)) as (port, _, _server):
        client = await RawClient.connect(port)
        client.send(opening(1, "/t.T/Say"), data(1, prefixed(b"x"), ends=True))
        assert await client.farewell() == frames.NO_ERROR


async def test_a_peer_that_answers_no_ping_is_cut_off_and_its_calls_end() -> None:
    limits = ConnectionLimits(ping_after_s=0.2, ping_answer_s=0.3)
    async with served(limits) as (port, service, server):
        client = await RawClient.connect(port)
        client.send(opening(1, "/t.T/Wait"), data(1, prefixed(b"x"), ends=True))
        assert (await client.next_of(frames.PING)) is not None
        assert await client.farewell() is None
        await until(lambda: service.ended == 1 and server.calls == 0)


async def test_a_lost_connection_ends_its_calls() -> None:
    async with served() as (port, service, server):
        client = await RawClient.connect(port)
        client.send(opening(1, "/t.T/Wait"), data(1, prefixed(b"x"), ends=True))
        await until(lambda: service.begun == 1)
        client.close()
        await until(lambda: service.ended == 1 and server.calls == 0)


@pytest.mark.parametrize(
    "begin", [b"", b"PRI * HTTP", PREFACE, b"GET / HTTP/1.1\r\n\r\n", b"\x16\3\1"]
)
async def test_what_never_becomes_http2_is_dropped(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ListenerLimits(wait_s=0.3)
    monkeypatch.setattr("catenary_services.grpc.server.server._LISTENER_LIMITS", limits)
    async with served() as (port, _, server):
        client = await RawClient.connect(port, begin)
        while await client.frame() is not None:
            pass
        await until(lambda: not server.connections)


async def test_connections_beyond_the_number_are_dropped() -> None:
    async with served(most_connections=4) as (port, _, server):
        clients = [await RawClient.connect(port) for _ in range(4)]
        await until(lambda: server.connections == 4)
        late = await RawClient.connect(port)
        assert await late.frame() is None
        for client in clients:
            client.close()
        await until(lambda: not server.connections)


async def test_a_half_made_tls_handshake_is_dropped(tmp_path: Any) -> None:
    security = Certificates(tmp_path).server("scheduler", "s")
    server = create_server(security)
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    hello = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    machine = context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        machine.do_handshake()
    client = await RawClient.connect(port, hello.read()[:50])
    assert await client.frame() is None
    await server.stop(0)


async def test_what_is_no_call_of_grpc_is_told_by_http() -> None:
    async with served() as (port, _, _server):
        client = await RawClient.connect(port)
        pairs = (("content-type", "text/html"), ("content-type", "application/grpc-web"))
        for number, pair in zip((1, 3), pairs, strict=True):
            block = call_headers("/t.T/Say").partition(b"\x00\x0ccontent-type")[0]
            block += b"\x00\x0ccontent-type" + bytes([len(pair[1])]) + pair[1].encode()
            client.send(frame(frames.HEADERS, END_HEADERS, number, block))
            answer = await client.next_of(frames.HEADERS)
            assert answer is not None
            assert b":status\x03415" in answer.payload
        client.close()
