"""A scheduler that says what cannot be loses its stream; the gateway goes on, and finds another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from gateway_harness import Stage, stage
from hostile.any_message import messages

Down = scheduler_pb2.SchedulerToGatewayMessage
NONSENSE = {
    "epoch": Down(welcome=scheduler_pb2.Welcome(epoch=1 << 60)),
    "rows": Down(
        dispatch=scheduler_pb2.DispatchBatch(
            batch_rows=1, slices=[common_pb2.Slice(gateway_id="g", rows=2)]
        )
    ),
    "name": Down(directory=scheduler_pb2.Directory(peers=[common_pb2.Peer(peer_id="a\x00")])),
    "time": Down(reject=scheduler_pb2.RejectRequest(retry_after_ns=2**64 - 1)),
}


async def met_again(played: Stage, before: int) -> None:
    async with asyncio.timeout(20):
        while played.scheduler.sessions <= before or not played.gateway._catalog.known:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_ends_the_stream_and_nothing_else(tmp_path: Path, message: Any) -> None:
    async with stage(tmp_path) as played:
        before = played.scheduler.sessions
        played.scheduler.send(message)
        await met_again(played, before)
        registry = played.gateway._metrics.registry
        labels = {"role": "scheduler"}
        assert registry.get_sample_value("catenary_invalid_messages_total", labels) == 1


@asynccontextmanager
async def playing(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path) as played:
        yield played


def test_nothing_a_scheduler_says_ends_a_gateway(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        acting = playing(tmp_path)
        played = runner.run(acting.__aenter__())

        async def hear(message: Any) -> None:
            played.scheduler.send(message)
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in played.gateway._schedulers._tasks)

        @settings(
            max_examples=80,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(messages(Down.DESCRIPTOR))
        def attack(message: Any) -> None:
            runner.run(hear(message))

        try:
            attack()
            before = played.scheduler.sessions
            played.scheduler.send(NONSENSE["time"])
            runner.run(met_again(played, before))
        finally:
            runner.run(acting.__aexit__(None, None, None))
