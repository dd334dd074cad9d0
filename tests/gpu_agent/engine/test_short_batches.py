"""Short batches are computed on the event loop, if it and the device have nothing else to do."""

from __future__ import annotations

import asyncio
import itertools
import threading

import numpy as np

from catenary_agent.engine.engine import EngineLimits
from catenary_agent.engine.partitions import LoadedPartition
from catenary_agent.supervision.faults import FaultInjector
from shared_helpers.waiting import until
from tests.support.agent_harness import ScriptedExecutor, entered, header, x

SHORT_NS, LONG_NS = 60_000, 5_000_000
BATCHES = 100


class Watched(ScriptedExecutor):
    """Notes the thread of each run."""

    def __init__(self, key):
        super().__init__(key)
        self.threads: list[int] = []

    def run(self, inputs, outputs=None):
        self.threads.append(threading.get_ident())
        return super().run(inputs, outputs)

    @property
    def on_loop(self) -> list[bool]:
        return [each == threading.main_thread().ident for each in self.threads]


async def serving(net, limits=None, *, any_thread=True):
    """Returns a gateway, an agent, and the executor of a partition whose 2 rows take longer."""
    gateway, node = await net.gateway(), await net.agent(limits=limits)
    executor = Watched(node.host(0, 1).key)
    loaded = LoadedPartition(executor, False, 16, (SHORT_NS, LONG_NS), any_thread=any_thread)
    node.engine.partitions.add(loaded)
    return gateway, node, executor


async def answer(gateway, number, rows=1):
    await gateway.send("a-0", header(number, rows=rows), t0=x(rows, number))
    result = await gateway.next()
    np.testing.assert_array_equal(result.tensors["t1"], x(rows, number) * 2)


async def test_a_short_batch_needs_no_thread_and_a_long_one_does(net):
    gateway, node, executor = await serving(net)
    for number, rows in ((1, 1), (2, 2), (3, 1), (4, 3)):
        await answer(gateway, number, rows)
    assert executor.on_loop == [True, False, True, False]
    reports = await node.told.wait_for("stage_report", 4)
    assert [report.batch_id for report in reports] == [1, 2, 3, 4]
    await until(lambda: node.engine.held_batches == 0 and node.engine.held_bytes == 0)


async def test_an_executor_that_is_tied_to_its_thread_stays_there(net):
    gateway, _, executor = await serving(net, any_thread=False)
    await answer(gateway, 1)
    assert executor.on_loop == [False]


async def test_nothing_is_computed_on_the_loop_where_steps_may_be_made_to_hang(net, tmp_path):
    limits = EngineLimits(faults=FaultInjector(tmp_path / "faults.json"))
    gateway, _, executor = await serving(net, limits)
    await answer(gateway, 1)
    assert executor.on_loop == [False]


async def test_the_loop_does_not_wait_for_a_step_that_has_the_device(net):
    gateway, node, executor = await serving(net)
    with node.engine.steps.turns:
        await gateway.send("a-0", header(1), t0=x(1))
        await until(lambda: node.engine.steps.turns.waiting == 1)  # the thread waits for its turn
        assert executor.threads == []
    await gateway.next()
    assert executor.on_loop == [False]


async def test_a_failure_on_the_loop_fails_its_batch_alone(net):
    gateway, node, executor = await serving(net)
    executor.fails = RuntimeError("no")
    await gateway.send("a-0", header(1), t0=x(1))
    (failed,) = await node.told.wait_for("batch_failed")
    assert failed.batch_id == 1
    executor.fails = None
    await answer(gateway, 2)
    assert executor.on_loop == [True, True]


async def test_the_loop_gets_to_other_work_between_many_short_batches(net):
    gateway, node, executor = await serving(net)
    loop, turns = asyncio.get_running_loop(), []

    def turn():
        turns.append(len(executor.threads))
        if len(executor.threads) < BATCHES:
            loop.call_soon(turn)

    await answer(gateway, BATCHES + 1)
    executor.entered.clear()
    executor.gate.clear()
    await gateway.send("a-0", header(1, rows=2), t0=x(2, 1))  # a long one, on the thread
    await entered(executor)
    for number in range(2, BATCHES + 1):
        await gateway.send("a-0", header(number), t0=x(1, number))
    await until(lambda: node.engine.held_batches == BATCHES)
    executor.gate.set()
    turn()
    answered = [(await gateway.next()).header.batch_id for _ in range(BATCHES)]
    assert sorted(answered) == list(range(1, BATCHES + 1))
    assert sum(executor.on_loop) >= BATCHES - 3
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 20
    await until(lambda: node.engine.held_batches == 0)
