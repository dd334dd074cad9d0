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
from google.protobuf import empty_pb2, wrappers_pb2
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.errors import CatenaryError, Overloaded, Unauthenticated
from catenary_services.grpc.grpc_kit import bind
from catenary_services.grpc.server.methods import MethodTable
from catenary_services.grpc.server.receiving_budget import ArrivingMessage, ReceivingBudget
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.http2.limits import ConnectionLimits
from catenary_services.security.tls import ServerSecurity
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
        given = dict(context.invocation_metadata()).get("authorization")
        if given is None:
            raise Unauthenticated("no API key")
        return "" if given == "yes" else str(given)

    def refused(self, method: str, context: Any, error: CatenaryError) -> None:
        self.refusals.append(error)


async def say(request: Bytes, context: Any) -> Bytes:
    return request


async def talk(requests: AsyncIterator[Bytes], context: Any) -> AsyncIterator[Bytes]:
    async for request in requests:
        yield request


async def nothing(request: empty_pb2.Empty, context: Any) -> empty_pb2.Empty:
    return request


@asynccontextmanager
async def served(budget: ReceivingBudget, most: int = 4 * MIB) -> AsyncIterator[tuple[str, Gate]]:
    gate = Gate()
    methods = MethodTable({METHOD: most, TALK: most}, MIB, {})
    server = GrpcServer(gate, methods, budget, ConnectionLimits(), longest_answer=64 * MIB)
    handlers: dict[str, Any] = {
        "Say": grpc.unary_unary_rpc_method_handler(say, Bytes.FromString, Bytes.SerializeToString),
        "Talk": grpc.stream_stream_rpc_method_handler(
            talk, Bytes.FromString, Bytes.SerializeToString
        ),
        "Nothing": grpc.unary_unary_rpc_method_handler(
            nothing, empty_pb2.Empty.FromString, empty_pb2.Empty.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = bind(server, "127.0.0.1", 0, ServerSecurity(insecure=True))
    await server.start()
    try:
        yield f"127.0.0.1:{port}", gate
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
    async with served(ReceivingBudget(MIB)) as (target, _):
        line = await asyncio.to_thread(
            half_sent, target, 3 * MIB, 20, until=lambda line: line.answers.total() == 20
        )
        assert line.answers == Counter(UNAUTHENTICATED=20)
        assert line.sent <= 20 * 65_535  # what HTTP/2 lets through before anybody reads


async def test_a_message_without_fields_is_not_read() -> None:
    async with served(ReceivingBudget(MIB)) as (target, _):
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


async def test_no_more_arrives_than_there_is_room_for_and_much_more_is_sent_back() -> None:
    budget = ReceivingBudget(8 * MIB)
    async with served(budget) as (target, gate):
        # Of 20 messages one has room, four wait, and fifteen are told to come back.
        line = await asyncio.to_thread(
            half_sent,
            target,
            4 * MIB,
            20,
            YES,
            until=lambda line: line.answers.total() == 15 and line.sent > 4 * MIB,
        )
        assert line.answers == Counter(OVERLOADED=15)
        assert all(error.retry_after_ns for error in gate.refusals)
        assert budget.held == 4 * MIB
        assert line.sent <= 4 * MIB + 20 * 65_535
        for _ in range(20):
            line.turn(b"")
        assert line.sent <= 4 * MIB + 20 * 65_535


async def test_one_source_has_a_share_and_one_message_of_any_size() -> None:
    async with served(ReceivingBudget(64 * MIB, most_of_one=2 * MIB), most=8 * MIB) as (target, _):
        line = await asyncio.to_thread(
            half_sent, target, 6 * MIB, 1, YES, until=lambda line: line.sent > 5 * MIB
        )
        assert not line.answers


async def test_whoever_holds_most_is_cut_off_if_others_starve() -> None:
    async with served(ReceivingBudget(8 * MIB, most_of_one=8 * MIB)) as (target, _):
        greedy = await asyncio.to_thread(
            half_sent, target, 4 * MIB, 2, YES, until=lambda line: line.sent > 7 * MIB
        )
        async with grpc.aio.insecure_channel(target) as channel:
            message = Bytes(value=os.urandom(3 * MIB)).SerializeToString()
            other = ("authorization", "other")
            assert await channel.unary_unary(METHOD)(message, metadata=(other,)) == message
        while greedy.answers.total() != 2:
            greedy.turn(b"")
        assert greedy.answers == Counter(OVERLOADED=2)


async def test_a_message_that_stops_arriving_is_given_up() -> None:
    budget = ReceivingBudget(64 * MIB, silence_s=0.3)
    async with served(budget) as (target, _):
        line = await asyncio.to_thread(
            half_sent, target, MIB, 1, YES, until=lambda line: line.answers.total() == 1
        )
        assert line.answers == Counter(DEADLINE_EXCEEDED=1)
        assert budget.held == 0


async def test_a_message_that_does_not_begin_is_given_up() -> None:
    async with (
        served(ReceivingBudget(64 * MIB, silence_s=0.3)) as (target, gate),
        grpc.aio.insecure_channel(target) as channel,
    ):
        call = channel.stream_unary(METHOD)(metadata=(YES,))
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(gate.refusals) == 1


async def test_a_message_larger_than_its_method_takes_is_refused_before_it_comes() -> None:
    async with (
        served(ReceivingBudget(64 * MIB), most=MIB) as (target, _),
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
        line = await asyncio.to_thread(
            half_sent, target, 8 * MIB, 1, YES, until=lambda line: line.answers.total() == 1
        )
        assert line.answers == Counter(PAYLOAD_TOO_LARGE=1)
        assert line.sent <= 65_535


async def test_slow_messages_within_the_limits_arrive_though_they_wait() -> None:
    async with (
        served(ReceivingBudget(8 * MIB, most_of_one=7 * MIB)) as (target, _),
        grpc.aio.insecure_channel(target) as channel,
    ):
        call = channel.unary_unary(METHOD)
        message = Bytes(value=os.urandom(3 * MIB)).SerializeToString()
        answers = await asyncio.gather(*(call(message, metadata=(YES,)) for _ in range(8)))
        assert answers == [message] * 8


async def test_a_stream_may_be_silent_and_go_on() -> None:
    budget = ReceivingBudget(64 * MIB, silence_s=0.1)
    async with served(budget) as (target, _), grpc.aio.insecure_channel(target) as channel:
        stream = channel.stream_stream(TALK)(metadata=(YES,))
        for size in (1, 3 * MIB, 1, MIB):
            message = Bytes(value=bytes(size)).SerializeToString()
            await stream.write(message)
            assert await stream.read() == message
            await asyncio.sleep(0.5)
            assert budget.held == 0


class Owner:
    """A call that notes what becomes of its message."""

    def __init__(self) -> None:
        self.has_room = False
        self.given_up = False

    def on_room(self) -> None:
        self.has_room = True

    def give_up(self, error: CatenaryError) -> None:
        self.given_up = True


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "look"]), st.sampled_from("abc"), st.integers(1, 70)
    ),
    max_size=60,
)


@given(STEPS)
def test_the_room_is_never_overdrawn_and_nobody_waits_beside_free_room(
    steps: list[tuple[str, str, int]],
) -> None:
    budget, now_s = ReceivingBudget(100, most_of_one=50), 0.0
    alive: list[ArrivingMessage] = []
    for what, source, amount in steps:
        now_s += amount / 20
        if what == "enter":
            message = ArrivingMessage(Owner(), source, amount, now_s)
            try:
                budget.enter(message)
            except Overloaded:
                continue
            alive.append(message)
        elif what == "leave" and alive:
            budget.leave(alive.pop(amount % len(alive)))
        else:
            budget.look(now_s)
            for message in [each for each in alive if each.owner.given_up]:
                alive.remove(message)
                budget.leave(message)
        inside = [each for each in alive if each.has_room]
        assert budget.held == sum(each.nbytes for each in inside)
        assert budget.held <= 100 or len(inside) == 1
        for name in "abc":
            own = [each.nbytes for each in inside if each.source == name]
            assert sum(own) <= 50 or len(own) == 1
        waiting = [each for each in alive if not each.has_room]
        assert inside or not waiting
    for message in alive:
        budget.leave(message)
    assert budget.held == 0
