"""An agent that cannot compute any more says so and ends; in-process, so its exit is noted only."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from catenary_agent.process import AgentProcess
from catenary_agent.supervision.termination import EXIT_DEVICE_LOST, EXIT_STUCK
from catenary_protos.catenary.v1 import scheduler_pb2
from tests.gpu_agent.process.test_process import directory, rows_of, tiny_header
from tests.support.agent_harness import peer_of


class Exit:
    """Notes the exit code instead of leaving."""

    def __init__(self, agent: AgentProcess) -> None:
        self.codes: list[int] = []
        self._over = threading.Event()
        agent.ending._exit_now = self._leave

    def _leave(self, code: int) -> None:
        self.codes.append(code)
        self._over.set()

    async def code(self) -> int:
        assert await asyncio.to_thread(self._over.wait, 30)
        return self.codes[0]


async def serving(bench, tmp_path, **options):
    scheduler = await bench.scheduler()
    file = tmp_path / "faults.json"
    agent = await bench.agent(
        scheduler.port, faults_file=file, allow_faults=True, heartbeat_s=0.05, **options
    )
    left = Exit(agent)
    gateway = await bench.net.gateway()
    await scheduler.order_when_there(load_partition=bench.load(0, 4))
    await scheduler.wait_for("partition_loaded")
    peers = directory(peer_of("gw-0", gateway.hub))
    await scheduler.order(directory=peers)
    gateway.hub.update_directory([peer_of("a-0", agent.hub, agent.incarnation)])
    return scheduler, agent, gateway, left, file


def say(file, **fault: object) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(fault))
    fresh.replace(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("CUDA error: an illegal memory access was encountered", "DEVICE_LOST"),
        ("CUDA out of memory. Tried to allocate 2 GiB", "DEVICE_OUT_OF_MEMORY"),
        ("something else", "DEVICE_FAILED"),
    ],
)
async def test_a_failed_batch_is_told_as_retryable_and_only_a_lost_device_ends_the_process(
    bench, tmp_path, text, reason
):
    scheduler, agent, gateway, left, file = await serving(bench, tmp_path)
    say(file, fail=text)
    await gateway.send("a-0", tiny_header("a-0", blocks=[(0, 4)], rows=2), x=rows_of(2))
    [failed] = await scheduler.wait_for("batch_failed")
    assert (failed.failure.reason, failed.failure.retryable) == (reason, True)
    if reason == "DEVICE_LOST":
        assert await left.code() == EXIT_DEVICE_LOST
        [ending] = await scheduler.wait_for("ending")
        assert ending.reason == reason
    else:
        assert not agent.ending.has_begun


async def test_a_step_that_hangs_shows_in_heartbeats_and_ends_the_process(bench, tmp_path):
    options = {"stuck_s": 1.0, "stuck_factor": 1.0}
    scheduler, _, gateway, left, file = await serving(bench, tmp_path, **options)
    say(file, hang=True)
    await gateway.send("a-0", tiny_header("a-0", blocks=[(0, 4)], rows=2), x=rows_of(2))
    assert await left.code() == EXIT_STUCK
    await scheduler.wait_for("ending")
    ages = [step.age_ns for beat in scheduler.of("heartbeat") for step in beat.steps]
    assert ages[-3:] == sorted(ages[-3:])  # those before may be of an earlier step
    assert ages[-1] > 500_000_000
    file.unlink()  # so that the thread ends with the test


async def test_an_order_to_end_is_obeyed_although_a_step_hangs(bench, tmp_path):
    scheduler, _, gateway, left, file = await serving(bench, tmp_path)
    say(file, hang=True)
    await gateway.send("a-0", tiny_header("a-0", blocks=[(0, 4)], rows=2), x=rows_of(2))
    await scheduler.order(end_process=scheduler_pb2.EndProcess(why="it hangs"))
    assert await left.code() == EXIT_STUCK
    file.unlink()
