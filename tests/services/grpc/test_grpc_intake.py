"""Servers look at calls by their headers, and bound what is held of messages that are arriving."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from catenary_services.grpc.grpc_intake import CallInterceptor
from catenary_services.grpc.grpc_receiving import LOOK_S, ReceivingMessages
from google.protobuf import empty_pb2, wrappers_pb2

from catenary_services.errors import CatenaryError, Unauthenticated
from hostile.attacks import HalfSent

MIB = 1 << 20
METHOD = "/t.T/Say"
TALK = "/t.T/Talk"
Bytes = wrappers_pb2.BytesValue


class Gate:
    """Lets in who says so, and remembers who was refused later."""

    def __init__(self) -> None:
        self.refusals: list[CatenaryError] = []

    def enter(self, method: str, context: Any, peer: str) -> str:
        if dict(context.invocation_metadata()).get("authorization") != "yes":
            raise Unauthenticated("no API key")
        return "somebody"

    def refused(self, method: str, context: Any, error: CatenaryError) -> None:
        self.refusals.append(error)


async def say(request: Bytes, context: Any) -> Bytes:
    return request


async def talk(requests: AsyncIterator[Bytes], context: Any) -> AsyncIterator[Bytes]:
    async for request in requests:
        yield request


async def fail(request: empty_pb2.Empty, context: Any) -> empty_pb2.Empty:
    return request


@asynccontextmanager
async def served(
    receiving: ReceivingMessages, most: int = 4 * MIB
) -> AsyncIterator[tuple[str, Gate]]:
    call_authorizer = Gate()
    intake = CallInterceptor(call_authorizer, receiving, {METHOD: most, TALK: most})
    server = grpc.aio.server(
        options=[("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", 64 * MIB)],
    )
    intake.guard(server)
    handlers: dict[str, Any] = {
        "Say": grpc.unary_unary_rpc_method_handler(say, Bytes.FromString, Bytes.SerializeToString),
        "Talk": grpc.stream_stream_rpc_method_handler(
            talk, Bytes.FromString, Bytes.SerializeToString
        ),
        "Nothing": grpc.unary_unary_rpc_method_handler(
            fail, empty_pb2.Empty.FromString, empty_pb2.Empty.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", call_authorizer
    finally:
        await server.stop(0)


YES = ("authorization", "yes")


def half_sent(
    target: str,
    nbytes: int,
    calls: int,
    *headers: tuple[str, str],
    path: str = METHOD,
    until: Callable[[HalfSent], bool],
) -> HalfSent:
    line = HalfSent(target)
    for number in range(calls):
        line.call(2 * number + 1, path, nbytes, *headers)
    noise, end_s = os.urandom(16_384), time.monotonic() + 20
    while not until(line) and not line.is_closed:
        assert time.monotonic() < end_s, (line.answers, line.sent)
        line.turn(noise)
    return line


async def test_a_call_that_is_not_let_in_is_not_read() -> None:
    async with served(ReceivingMessages(MIB)) as (target, _):
        line = await asyncio.to_thread(
            half_sent, target, 3 * MIB, 20, until=lambda line: line.answers.total() == 20
        )
        assert line.answers == Counter(UNAUTHENTICATED=20)
        assert line.sent <= 20 * 65_535  # what HTTP/2 lets through before anybody reads


async def test_a_message_without_fields_is_not_read() -> None:
    async with served(ReceivingMessages(MIB)) as (target, _):
        line = await asyncio.to_thread(
            half_sent,
            target,
            3 * MIB,
            5,
            YES,
            path="/t.T/Nothing",
            until=lambda line: line.answers.total() == 5,
        )
        assert line.answers == Counter(OK=5)


async def test_whoever_holds_most_is_cut_off_and_told_to_come_back() -> None:
    async with served(ReceivingMessages(8 * MIB)) as (target, call_authorizer):
        line = await asyncio.to_thread(
            half_sent, target, 4 * MIB, 20, YES, until=lambda line: line.answers.total() == 20
        )
        assert line.answers == Counter(OVERLOADED=20)
        assert all(error.retry_after_ns for error in call_authorizer.refusals)


async def test_one_source_has_a_share_and_one_message_of_any_size() -> None:
    async with served(ReceivingMessages(64 * MIB, most_of_one=2 * MIB), most=8 * MIB) as (
        target,
        _,
    ):
        line = await asyncio.to_thread(
            half_sent, target, 6 * MIB, 4, YES, until=lambda line: line.answers.total() == 4
        )
        assert line.answers == Counter(OVERLOADED=4)
        line = await asyncio.to_thread(
            half_sent, target, 6 * MIB, 1, YES, until=lambda line: line.sent > 5 * MIB
        )
        assert not line.answers


async def test_a_message_that_stops_arriving_is_given_up() -> None:
    async with served(ReceivingMessages(64 * MIB, silence_s=0.3)) as (target, _):
        line = await asyncio.to_thread(
            half_sent, target, MIB, 1, YES, until=lambda line: line.answers.total() == 1
        )
        assert line.answers == Counter(DEADLINE_EXCEEDED=1)


async def test_a_message_larger_than_its_method_takes_is_refused() -> None:
    async with (
        served(ReceivingMessages(64 * MIB), most=MIB) as (target, _),
        grpc.aio.insecure_channel(target) as channel,
    ):
        call = channel.unary_unary(
            METHOD,
            request_serializer=Bytes.SerializeToString,
            response_deserializer=Bytes.FromString,
        )
        assert (await call(Bytes(value=b"x" * 1000), metadata=(YES,))).value == b"x" * 1000
        with pytest.raises(grpc.aio.AioRpcError, match="at most"):
            await call(Bytes(value=bytes(MIB + 1)), metadata=(YES,))


async def test_slow_messages_within_the_limits_arrive() -> None:
    async with (
        served(ReceivingMessages(64 * MIB)) as (target, _),
        grpc.aio.insecure_channel(target) as channel,
    ):
        call = channel.unary_unary(METHOD)
        message = Bytes(value=os.urandom(3 * MIB)).SerializeToString()
        answers = await asyncio.gather(*(call(message, metadata=(YES,)) for _ in range(8)))
        assert answers == [message] * 8


async def test_frames_around_many_small_messages_are_not_held_against_an_idle_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("catenary_services.grpc.grpc_receiving._SLACK_BYTES", 4096)
    async with (
        served(ReceivingMessages(64 * MIB), most=1024) as (target, _),
        grpc.aio.insecure_channel(target) as channel,
    ):
        stream = channel.stream_stream(TALK)(metadata=(YES,))
        message = Bytes(value=b"x").SerializeToString()
        await stream.write(message)
        assert await stream.read() == message
        call = channel.unary_unary(METHOD)
        for _ in range(40):
            await asyncio.gather(*(call(message, metadata=(YES,)) for _ in range(20)))
            await asyncio.sleep(LOOK_S)  # it is looked at in between
        await stream.write(message)
        assert await stream.read() == message


async def test_a_stream_may_be_silent_and_go_on() -> None:
    receiving = ReceivingMessages(64 * MIB, silence_s=0.1)
    async with served(receiving) as (target, _), grpc.aio.insecure_channel(target) as channel:
        stream = channel.stream_stream(TALK)(metadata=(YES,))
        for size in (1, 3 * MIB, 1, MIB):
            message = Bytes(value=bytes(size)).SerializeToString()
            await stream.write(message)
            assert await stream.read() == message
            await asyncio.sleep(0.3)
            assert receiving.held < 64 * 1024
