"""A scheduler that says what cannot be loses its stream; the agent goes on, and finds another."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from hostile.any_message import messages

Down = scheduler_pb2.SchedulerToAgentMessage
LOAD = scheduler_pb2.LoadPartition(
    key=scheduler_pb2.PartitionKey(model="../x", model_version="1", last_block=1), max_batch=1
)
NONSENSE = {
    "epoch": {"epoch": 1 << 60, "heartbeat": scheduler_pb2.Heartbeat()},
    "path": {"load_partition": LOAD},
    "name": {"directory": scheduler_pb2.Directory(peers=[common_pb2.Peer(peer_id="a|b")])},
    "id": {"cancel_batch": scheduler_pb2.CancelBatch(batch_ids=[2**64 - 1])},
}


async def met_again(scheduler, before: int) -> None:
    async with asyncio.timeout(20):
        while scheduler.sessions <= before:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_ends_the_stream_and_nothing_else(bench, said) -> None:
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port)
    await scheduler.wait_for("hello")
    before = scheduler.sessions
    await scheduler.order(**said)
    await met_again(scheduler, before)
    assert agent.epoch == 1
    registry = agent.metrics.registry
    labels = {"role": "scheduler"}
    assert registry.get_sample_value("catenary_invalid_messages_total", labels) == 1


async def test_an_order_that_cannot_be_carried_out_for_a_bug_ends_the_stream_only(bench) -> None:
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port)
    await scheduler.wait_for("hello")

    def fall_over(peers: object) -> None:
        raise ZeroDivisionError

    agent.hub.update_directory = fall_over
    before = scheduler.sessions
    await scheduler.order(directory=scheduler_pb2.Directory())
    await met_again(scheduler, before)


async def test_nothing_a_scheduler_says_but_the_order_to_end_ends_an_agent(bench) -> None:
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port)
    await scheduler.wait_for("hello")
    said = []

    @settings(
        max_examples=80,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(messages(Down.DESCRIPTOR))
    def collect(message) -> None:
        said.append(message)

    collect()
    for message in said:
        if message.HasField("end_process"):
            continue  # the order of a process's end, which is obeyed
        message.epoch = min(message.epoch, 1)  # else nobody is obeyed any more, as it should be
        if message.HasField("welcome"):
            message.welcome.epoch = 1
        try:
            await scheduler._calls[-1].write(
                scheduler_pb2.SchedulerToAgentMessages(messages=[message])
            )
        except Exception:
            await asyncio.sleep(0.05)  # the stream has ended; the next one is under way
        await asyncio.sleep(0.01)
    before = scheduler.sessions
    async with asyncio.timeout(20):
        while scheduler.sessions == before:
            try:
                await scheduler.order(**NONSENSE["id"])
            except Exception:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
    assert not any(task.done() for task in agent._tasks)
