"""Batches that wait for another booking: for how long, and when they do not."""

from __future__ import annotations

import time

import pytest

from catenary_agent.engine import batch as batches
from catenary_agent.engine.batch import SchedulerClock
from catenary_agent.engine.engine import EngineLimits
from shared_helpers.waiting import until
from tests.support.agent_harness import SECOND_NS, header, x

MS = 1_000_000
LATER_NS = 3600 * SECOND_NS


async def hosting(net):
    """Returns a gateway and an agent that knows the scheduler's clock, and hosts a block."""
    gateway, node = await net.gateway(), await net.agent()
    now_ns = time.monotonic_ns()
    node.engine.clock.heard(1, now_ns, now_ns)
    node.host(0, 1)
    return gateway, node


def behind(batch_id: int, other: int, **options):
    """Returns the header of a batch that may not be computed for an hour, or behind another."""
    made = header(batch_id, **options)
    made.route[0].earliest_start_ns = time.monotonic_ns() + LATER_NS
    made.route[0].behind_batch_id = other
    return made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches wait as long as they are booked to."""
    monkeypatch.setattr(batches, "_LONGEST_WAIT_NS", 2 * LATER_NS)


async def computed(node, count: int) -> list[int]:
    await node.told.wait_for("stage_report", count)
    return [report.batch_id for report in node.told.of("stage_report")]


async def test_the_device_is_kept_free_for_the_batch_that_is_booked_ahead(net, patient):
    gateway, node = await hosting(net)
    await gateway.send("a-0", behind(2, 1, start_ns=20), t0=x(1))
    await until(lambda: node.engine.queued_batches == 1)
    await gateway.send("a-0", header(1, start_ns=10), t0=x(1))
    assert await computed(node, 2) == [1, 2]


async def test_a_batch_does_not_wait_for_one_that_was_computed_before(net, patient):
    gateway, node = await hosting(net)
    await gateway.send("a-0", header(1), t0=x(1))
    await computed(node, 1)
    await gateway.send("a-0", behind(2, 1), t0=x(1))
    assert await computed(node, 2) == [1, 2]


async def test_a_batch_does_not_wait_for_one_that_was_cancelled(net, patient):
    gateway, node = await hosting(net)
    await gateway.send("a-0", behind(2, 1), t0=x(1))
    await until(lambda: node.engine.queued_batches == 1)
    node.engine.cancel(1)
    assert await computed(node, 1) == [2]


@pytest.mark.parametrize("epoch", [2, None])
async def test_without_the_clock_of_its_scheduler_a_batch_does_not_wait(net, patient, epoch):
    gateway, node = await hosting(net)
    now_ns = time.monotonic_ns()
    node.engine.clock.heard(epoch or 1, 0 if epoch is None else now_ns, now_ns)
    if epoch is None:
        node.engine.clock.heard(3, 0, now_ns)  # a leader that tells no time
    await gateway.send("a-0", behind(2, 1), t0=x(1))
    assert await computed(node, 1) == [2]


async def test_a_stale_window_costs_a_batch_a_few_milliseconds_and_no_more(net):
    gateway, _ = await hosting(net)
    await gateway.send("a-0", behind(2, 1), t0=x(1))
    result = await gateway.next()
    assert result.header.timings[0].wait_ns >= 20 * MS


async def test_a_measurement_is_made_while_a_batch_waits(net, patient):
    gateway, node = await hosting(net)
    await gateway.send("a-0", behind(2, 1), t0=x(1))
    await until(lambda: node.engine.queued_batches == 1)
    assert await node.engine.on_compute_thread(lambda: 5) == 5
    node.engine.cancel(1)
    assert await computed(node, 1) == [2]


async def test_outputs_wait_for_their_slot_on_the_link_but_not_for_long(net):
    limits = EngineLimits(emulated_link_bytes_per_second=10**9)
    gateway = await net.gateway()
    nodes = [await net.agent(name, limits) for name in ("a-0", "a-1")]
    for at, node in enumerate(nodes):
        now_ns = time.monotonic_ns()
        node.engine.clock.heard(1, now_ns, now_ns)
        node.host(at, at + 1)
    made = header(1, agents=("a-0", "a-1"))
    made.route[1].transfer_earliest_ns = time.monotonic_ns() + LATER_NS
    made.route[1].transfer_start_ns = made.route[1].transfer_earliest_ns
    made.route[1].transfer_duration_ns = 50 * MS
    await gateway.send("a-0", made, t0=x(1))
    result = await gateway.next()
    assert result.header.timings[0].send_ns >= 20 * MS
    [start] = await nodes[0].told.wait_for("stage_start")
    assert (start.batch_id, start.position, start.is_transfer) == (1, 1, True)


async def test_a_start_at_another_moment_than_booked_is_reported(net):
    gateway, node = await hosting(net)
    made = header(1)
    made.route[0].reserved_start_ns = time.monotonic_ns() + LATER_NS
    made.route[0].reserved_duration_ns = 50 * MS
    await gateway.send("a-0", made, t0=x(1))
    [start] = await node.told.wait_for("stage_start")
    assert (start.batch_id, start.position, start.is_transfer) == (1, 0, False)
    [done] = await node.told.wait_for("stage_report")
    assert done.batch_id == 1


async def test_starts_of_short_batches_are_not_worth_a_report(net):
    gateway, node = await hosting(net)
    made = header(1)
    made.route[0].reserved_start_ns = time.monotonic_ns() + LATER_NS
    await gateway.send("a-0", made, t0=x(1))
    await node.told.wait_for("stage_report")
    assert node.told.of("stage_start") == []


def test_the_heartbeat_that_came_fastest_tells_the_clock() -> None:
    clock = SchedulerClock()
    for clock_ns, now_ns in ((1000, 130), (2000, 1110), (3000, 2150)):
        clock.heard(1, clock_ns, now_ns)
    assert clock.here_ns(1, 5000) == 5000 - 890
    assert clock.here_ns(2, 5000) == 0
    assert clock.here_ns(1, 0) == 0
    clock.heard(2, 9000, 100)
    assert clock.here_ns(2, 9500) == 600
    assert clock.here_ns(1, 9500) == 0


def test_a_clock_is_forgotten_when_its_heartbeats_are_old() -> None:
    clock = SchedulerClock()
    clock.heard(1, 5000, 0)
    for at in range(1, 9):  # the clocks drift apart
        clock.heard(1, 4000 + 1000 * at, 1000 * at)
    assert clock.here_ns(1, 10_000) == 6000
