"""Deadlines on one timer; messages nobody waits for on another."""

from __future__ import annotations

import asyncio
import time

import pytest

from catenary_gateway.results.pending import Deadlines
from catenary_gateway.scheduler_link import SchedulerLink
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.control.pack_writer import PackWriter
from catenary_services.security.tls import ClientSecurity

MS = 1_000_000


async def test_each_deadline_is_called_once_in_order_and_not_early() -> None:
    pending = {1, 2, 3}
    called: list[tuple[int, int]] = []
    done = asyncio.Event()

    def expired(number: int) -> None:
        called.append((number, time.monotonic_ns()))
        pending.discard(number)
        if not pending:
            done.set()

    deadlines = Deadlines(expired, pending)
    start = time.monotonic_ns()
    for number, after_ms in ((1, 30), (2, 10), (3, 20)):
        deadlines.add(number, start + after_ms * MS)
    async with asyncio.timeout(30):
        await done.wait()
    assert [number for number, _ in called] == [2, 3, 1]
    for (_, moment), after_ms in zip(called, (10, 20, 30), strict=True):
        assert moment >= start + after_ms * MS


async def test_finished_requests_are_not_called_and_do_not_pile_up() -> None:
    pending: set[int] = set()
    called: list[int] = []
    deadlines = Deadlines(called.append, pending)
    an_hour = time.monotonic_ns() + 3_600_000 * MS
    for number in range(20_000):
        pending.add(number)
        deadlines.add(number, an_hour)
        pending.discard(number)
    assert not called
    assert len(deadlines._heap) <= 2_000
    deadlines.close()


@pytest.fixture
async def link_and_sent():
    sent: list[list[scheduler_pb2.GatewayMessage]] = []
    link = SchedulerLink(["127.0.0.1:1"], ClientSecurity(insecure=True))

    link._writer = PackWriter(sent.append, lambda: False)
    return link, sent


def finished(number: int) -> scheduler_pb2.GatewayMessage:
    return scheduler_pb2.GatewayMessage(finished=scheduler_pb2.RequestFinished(request_id=number))


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_what_nobody_waits_for_goes_with_the_next_message(link_and_sent) -> None:
    link, sent = link_and_sent
    link.send_soon(finished(1))
    link.send(scheduler_pb2.GatewayMessage(submit=scheduler_pb2.SubmitRequest(request_id=2)))
    await until(lambda: sent)
    assert [message.WhichOneof("kind") for message in sent[0]] == ["finished", "submit"]


async def test_what_nobody_waits_for_goes_by_itself_after_a_moment(link_and_sent) -> None:
    link, sent = link_and_sent
    link.send_soon(finished(1))
    link.send_soon(finished(2))
    await until(lambda: sent)
    assert [message.finished.request_id for message in sent[0]] == [1, 2]


async def test_without_a_scheduler_messages_are_dropped() -> None:
    link = SchedulerLink(["127.0.0.1:1"], ClientSecurity(insecure=True))
    link.send_soon(finished(1))
    link.send(finished(2))
    assert not link.is_connected
