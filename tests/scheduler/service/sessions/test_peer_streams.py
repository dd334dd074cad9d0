"""The scheduler's end of a stream: bounded for a peer that does not read, and over only once."""

from __future__ import annotations

import asyncio

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.wire.streams import PeerStream
from catenary_services.errors import Unavailable
from shared_helpers.control_streams import ScriptedEnd

BEAT = scheduler_pb2.SchedulerToAgentMessage(heartbeat=scheduler_pb2.Heartbeat())
CAPACITY = 65_536


async def test_a_peer_that_does_not_read_loses_its_stream() -> None:
    end = ScriptedEnd()
    end.stream.is_full = True
    session = PeerStream(end.stream, scheduler_pb2.SchedulerToAgentMessages)
    for number in range(CAPACITY):
        session.send(BEAT)
        if number % 1_000 == 0:
            await asyncio.sleep(0)
    assert not session.closed
    session.send(BEAT)
    assert session.closed
    await asyncio.sleep(0)
    assert isinstance(end.error, Unavailable)
    assert "wait for a peer that does not read them" in end.error.message


async def test_who_ends_a_stream_is_not_told_so_from_within_the_call() -> None:
    end = ScriptedEnd()
    stream = PeerStream(end.stream, scheduler_pb2.SchedulerToAgentMessages)
    stream.close(Unavailable("the first reason"))
    stream.close(Unavailable("the second reason"))
    assert stream.closed
    assert end.error is None
    await asyncio.sleep(0)
    assert str(end.error) == "the first reason"
