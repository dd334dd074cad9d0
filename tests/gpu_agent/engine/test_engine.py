from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from catenary_agent.engine.engine import EngineLimits
from catenary_protos.catenary.v1 import frame_pb2
from shared_helpers.waiting import until
from tests.support.agent_harness import SECOND_NS, entered, header, x

MS = 1_000_000


async def hosting(net):
    """Returns a gateway, an agent, and the executor of the block that it hosts."""
    gateway, node = await net.gateway(), await net.agent()
    return gateway, node, node.host(0, 1)


async def computing(net):
    """Returns the same, with batch 1 on the device until its gate is opened."""
    gateway, node, executor = await hosting(net)
    executor.gate.clear()
    await gateway.send("a-0", header(1), t0=x(1))
    await entered(executor)
    return gateway, node, executor


async def test_a_batch_comes_back_to_its_gateway_with_every_value(net):
    gateway, _, _ = await hosting(net)
    await gateway.send("a-0", header(rows=3), t0=x(3))
    result = await gateway.next()
    np.testing.assert_array_equal(result.tensors["t1"], x(3) * 2)
    assert result.header.kind == frame_pb2.FRAME_KIND_RESULT
    assert [s.request_id for s in result.header.slices] == [7]
    assert result.header.timings[0].agent_id == "a-0"
    assert result.header.budget_ns < 5 * SECOND_NS


async def test_batches_run_in_the_order_of_their_reservations(net):
    gateway, node, executor = await hosting(net)
    executor.gate.clear()
    await gateway.send("a-0", header(1, start_ns=0), t0=x(1, 100))
    await entered(executor)
    for batch_id, start in ((2, 50), (3, 40), (4, 20), (5, 30), (6, 10)):
        await gateway.send("a-0", header(batch_id, start_ns=start), t0=x(1, start))
    await until(lambda: node.engine.held_batches == 6)
    executor.gate.set()
    await node.told.wait_for("stage_report", 6)
    assert [report.batch_id for report in node.told.of("stage_report")] == [1, 6, 4, 5, 3, 2]


async def test_two_gateways_share_a_batch_and_get_their_own_rows(net):
    first, second = await net.gateway("gw-0"), await net.gateway("gw-1")
    node = await net.agent()
    executor = node.host(0, 1)
    # gw-0 owns rows 0 and 3, gw-1 owns rows 1 and 2.
    await second.send(
        "a-0", header(rows=2, batch_rows=4, first_row=1, gateway="gw-1", request=9), t0=x(2, 10)
    )
    await first.send("a-0", header(rows=1, batch_rows=4, first_row=3, request=2), t0=x(1, 30))
    assert node.executors[0, 1].ran == []
    await first.send("a-0", header(rows=1, batch_rows=4, first_row=0, request=1), t0=x(1, 0))
    mine, theirs = await first.next(), await second.next()
    np.testing.assert_array_equal(mine.tensors["t1"], np.concatenate([x(1, 0), x(1, 30)]) * 2)
    assert [(s.request_id, s.batch_row) for s in mine.header.slices] == [(1, 0), (2, 3)]
    assert mine.header.rows == 2
    np.testing.assert_array_equal(theirs.tensors["t1"], x(2, 10) * 2)
    assert [s.request_id for s in theirs.header.slices] == [9]
    assert len(executor.ran) == 1


async def test_rows_sent_twice_are_ignored(net):
    gateway, node, executor = await hosting(net)
    await gateway.send("a-0", header(rows=2, batch_rows=3), t0=x(2, 1))
    await gateway.send("a-0", header(rows=2, batch_rows=3), t0=x(2, 500))
    await gateway.send("a-0", header(rows=2, batch_rows=3, first_row=1), t0=x(2, 9))
    result = await gateway.next()
    expected = np.concatenate([x(2, 1), x(2, 9)[1:]]) * 2
    np.testing.assert_array_equal(result.tensors["t1"], expected)
    await gateway.send("a-0", header(rows=3), t0=x(3))
    await until(lambda: node.engine.ignored_frames == 2)
    assert len(executor.ran) == 1
    assert node.told.of("batch_failed") == []


async def test_outputs_travel_through_a_chain_of_agents(net):
    gateway = await net.gateway()
    nodes = [await net.agent(f"a-{i}") for i in range(3)]
    for i, node in enumerate(nodes):
        node.host(i, i + 1)
    for batch_id in (1, 2):  # the second finds links open, and is computed into their memory
        agents = ("a-0", "a-1", "a-2")
        await gateway.send("a-0", header(batch_id, rows=2, agents=agents), t0=x(2))
        result = await gateway.next()
        np.testing.assert_array_equal(result.tensors["t3"], x(2) * 8)
    assert [t.agent_id for t in result.header.timings] == ["a-0", "a-1", "a-2"]
    assert [node.executors[i, i + 1].wrote_in_place for i, node in enumerate(nodes)] == [
        [False, True]
    ] * 3
    assert all(t.transfer_ns > 0 for t in result.header.timings)


async def test_unknown_output_shapes_are_copied_after_the_run(net):
    gateway, _, executor = await hosting(net)
    executor.shapes_known = False
    for batch_id in (1, 2):
        await gateway.send("a-0", header(batch_id, rows=2), t0=x(2))
        np.testing.assert_array_equal((await gateway.next()).tensors["t1"], x(2) * 2)
    assert executor.wrote_in_place == [False, False]


async def test_large_outputs_are_copied_off_the_loop_and_arrive_whole(net):
    gateway, node = await net.gateway(), await net.agent()
    executor = node.host(0, 1, width=200_000)
    executor.shapes_known = False
    await gateway.send("a-0", header(rows=4), t0=x(4, width=200_000))
    result = await gateway.next()
    np.testing.assert_array_equal(result.tensors["t1"], x(4, width=200_000) * 2)


async def test_the_next_hop_on_the_same_agent_needs_no_transport(net, monkeypatch):
    gateway, node, _ = await hosting(net)
    node.host(1, 2)
    asked = []
    real = node.hub.link_to

    async def link_to(peer_id: str, timeout_s: float):
        asked.append(peer_id)
        return await real(peer_id, timeout_s)

    monkeypatch.setattr(node.hub, "link_to", link_to)
    await gateway.send("a-0", header(rows=2, agents=("a-0", "a-0")), t0=x(2))
    result = await gateway.next()
    np.testing.assert_array_equal(result.tensors["t2"], x(2) * 4)
    assert asked == ["gw-0"]
    assert [r.position for r in node.told.of("stage_report")] == [0, 1]
    assert result.header.timings[1].transfer_ns == 0


async def test_a_model_without_batch_dimension_is_answered_whole(net):
    gateway, node = await net.gateway(), await net.agent()
    node.host(0, 1, batched=False)
    await gateway.send("a-0", header(rows=1), t0=x(1))
    np.testing.assert_array_equal((await gateway.next()).tensors["t1"], x(1) * 2)


def _bad(**changes):
    made = header(rows=2)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def _route(**changes):
    made = header(rows=2)
    for name, value in changes.items():
        setattr(made.route[0], name, value)
    return made


def _tensor(**changes):
    made = header(rows=2)
    fields = {"name": "t0", "datatype": "FP32", "shape": [2, 4], "offset": 0, "nbytes": 32}
    made.tensors.add(**{**fields, **changes})
    return made


GOOD = x(2)


@pytest.mark.parametrize(
    ("made", "tensors", "reason", "says"),
    [
        (_bad(), {"t0": GOOD.astype(np.float64)}, "INVALID_INPUT", "datatype"),
        (_bad(), {"t0": x(2, width=5)}, "INVALID_INPUT", "shape"),
        (_bad(), {"t0": x(3)}, "INVALID_INPUT", "shape"),
        (_bad(), {"t0": GOOD.reshape(-1)}, "INVALID_INPUT", "shape"),
        (_bad(), {"other": GOOD}, "INVALID_INPUT", "'t0' is missing"),
        (_bad(), {"t0": GOOD, "t9": GOOD}, "INVALID_INPUT", "tensors"),
        (_bad(), {}, "INVALID_INPUT", "tensors"),
        (_tensor(nbytes=64), {"t0": GOOD}, "INVALID_INPUT", "tensors"),
        (_tensor(offset=4096), {"t0": GOOD}, "INVALID_INPUT", "tensors"),
        (_tensor(datatype="FP99"), {"t0": GOOD}, "INVALID_INPUT", "tensors"),
        (_bad(batch_rows=17), {"t0": GOOD}, "INVALID_INPUT", "batch_rows"),
        (_bad(batch_rows=0), {"t0": GOOD}, "INVALID_INPUT", "batch_rows"),
        (_bad(first_row=1), {"t0": GOOD}, "INVALID_INPUT", "rows"),
        (_bad(rows=0), {"t0": GOOD}, "INVALID_INPUT", "rows"),
        (_bad(rows=1), {"t0": x(1)}, "INVALID_INPUT", "slices"),
        (_route(agent_id="someone"), {"t0": GOOD}, "INVALID_INPUT", "route"),
        (_route(last_block=5), {"t0": GOOD}, "PARTITION_LOST", "not loaded"),
        (_route(model="other"), {"t0": GOOD}, "PARTITION_LOST", "not loaded"),
        (_bad(epoch=3), {"t0": GOOD}, "STALE_EPOCH", "epoch 3"),
        (_bad(budget_ns=0), {"t0": GOOD}, "DEADLINE_EXCEEDED", "deadline"),
        (_bad(budget_ns=-5), {"t0": GOOD}, "DEADLINE_EXCEEDED", "deadline"),
    ],
)
async def test_a_wrong_frame_fails_its_batch_and_nothing_else(net, made, tensors, reason, says):
    gateway, node, executor = await hosting(net)
    if reason == "STALE_EPOCH":
        node.engine.raise_epoch(4)
    await gateway.send("a-0", made, **tensors)
    [failed] = await node.told.wait_for("batch_failed")
    assert failed.failure.reason == reason
    assert says in failed.failure.message
    assert failed.failure.retryable == (reason in ("PARTITION_LOST", "STALE_EPOCH"))
    assert failed.batch_id == 1
    assert executor.ran == []
    await gateway.send("a-0", header(2, epoch=4), t0=x(1))
    assert (await gateway.next()).header.batch_id == 2
    assert node.engine.held_bytes == 0


@pytest.mark.parametrize(
    "made",
    [
        header(agents=("a-9", "a-0"), blocks=[(0, 1), (0, 1)], position=1),
        header(gateway="gw-1"),
        header(position=2),
    ],
    ids=["not the hop before", "not the gateway to be answered", "behind the route"],
)
async def test_a_frame_of_somebody_else_than_the_route_says_harms_nothing(net, made):
    """It may name a batch that others are still sending: that one is not even failed."""
    gateway, node = await net.gateway(), await net.agent()
    other = await net.gateway("gw-2")
    executor = node.host(0, 1)
    await gateway.send("a-0", header(batch_rows=2), t0=x(2)[:1])
    await until(lambda: node.engine.held_batches == 1)
    await other.send("a-0", made, t0=x(1))
    await until(lambda: node.engine.refused_frames == 1)
    assert node.told.messages == []
    assert executor.ran == []
    await gateway.send("a-0", header(batch_rows=2, first_row=1), t0=x(2)[1:])
    np.testing.assert_array_equal((await gateway.next()).tensors["t1"], x(2) * 2)
    assert node.engine.held_bytes == 0


@pytest.mark.parametrize(
    "noise",
    [b"\xff\xff\xff", b"", frame_pb2.FrameHeader(kind=1, epoch=2**63).SerializeToString()],
    ids=["noise", "nothing", "what cannot be"],
)
async def test_what_is_no_header_is_ignored_and_its_sender_has_to_connect_anew(net, noise):
    gateway, node, _ = await hosting(net)
    link = await gateway.hub.link_to("a-0", 5)
    await link.push(await link.export(64, 1), noise, 1)
    await until(lambda: node.engine.ignored_frames == 1)
    await link.push(await link.export(64, 1), noise, 1)
    await until(lambda: link.closed)
    assert node.engine.ignored_frames == 1
    await gateway.send("a-0", header(), t0=x(1))
    await gateway.next()
    assert node.told.of("batch_failed") == []


@pytest.mark.parametrize("kind", [2, 3, 4, 99])
async def test_frames_that_are_not_for_agents_are_ignored(net, kind):
    """So are frames of sessions at an agent without generation, and those of newer releases."""
    gateway, node, _ = await hosting(net)
    link = await gateway.hub.link_to("a-0", 5)
    unknown = frame_pb2.FrameHeader(kind=kind).SerializeToString()
    await link.push(await link.export(64, 1), unknown, 1)
    await until(lambda: node.engine.ignored_frames == 1)
    await gateway.send("a-0", header(), t0=x(1))
    await gateway.next()
    assert node.told.of("batch_failed") == []


async def test_later_hops_of_an_older_epoch_may_finish(net):
    gateway, node = await net.gateway(), await net.agent("a-1")
    before = await net.gateway("a-0")
    node.host(1, 2)
    node.engine.raise_epoch(9)
    await before.send("a-1", header(agents=("a-0", "a-1"), position=1, epoch=3), t1=x(1))
    assert (await gateway.next()).header.epoch == 3


async def test_a_batch_whose_budget_ends_while_it_waits_is_not_computed(net):
    gateway, node, executor = await computing(net)
    await gateway.send("a-0", header(2, start_ns=1, budget_ns=30 * MS), t0=x(1))
    await gateway.send("a-0", header(3, start_ns=2, budget_ns=30 * MS), t0=x(1))
    await until(lambda: node.engine.held_batches == 3)
    await asyncio.sleep(0.04)  # the budget itself is what is tested
    executor.gate.set()
    failures = await node.told.wait_for("batch_failed", 2)
    assert {f.batch_id for f in failures} == {2, 3}
    assert {f.failure.reason for f in failures} == {"DEADLINE_EXCEEDED"}
    assert not any(f.failure.retryable for f in failures)
    assert len(executor.ran) == 1


async def test_an_unfinished_batch_gives_up_when_its_budget_ends(net):
    gateway, node, _ = await hosting(net)
    await gateway.send("a-0", header(rows=1, batch_rows=2, budget_ns=40 * MS), t0=x(1))
    [failed] = await node.told.wait_for("batch_failed")
    assert failed.failure.reason == "DEADLINE_EXCEEDED"
    assert "1 of 2 rows" in failed.failure.message
    assert node.engine.held_bytes == 0


async def test_cancelled_batches_are_dropped_wherever_they_are(net):
    gateway, node, executor = await computing(net)
    await gateway.send("a-0", header(2, start_ns=1), t0=x(1))  # at the thread
    await gateway.send("a-0", header(3, start_ns=2), t0=x(1))  # ready
    await gateway.send("a-0", header(4, rows=1, batch_rows=2), t0=x(1))  # unfinished
    await until(lambda: node.engine.held_batches == 4)
    for batch_id in (1, 2, 3, 4, 5):
        node.engine.cancel(batch_id)
    await gateway.send("a-0", header(5), t0=x(1))  # not even here yet
    await gateway.send("a-0", header(6, start_ns=3), t0=x(1, 60))
    executor.gate.set()
    assert (await gateway.next()).header.batch_id == 6
    assert gateway.frames.empty()
    assert len(executor.ran) == 2
    assert node.told.of("batch_failed") == []
    assert await node.engine.wait_idle(2)
    assert node.engine.held_bytes == 0


async def test_a_dead_peer_fails_the_batch_retryably_and_by_name(net):
    gateway = await net.gateway()
    node, dead = await net.agent("a-0"), await net.agent("a-1")
    node.host(0, 1)
    dead.host(1, 2)
    await gateway.send("a-0", header(1, agents=("a-0", "a-1")), t0=x(1))
    await gateway.next()
    executor = node.executors[0, 1]
    executor.gate.clear()
    executor.entered.clear()
    await gateway.send("a-0", header(2, agents=("a-0", "a-1")), t0=x(1))
    await entered(executor)
    await net.remove("a-1")  # while its batch is computed into memory of its link
    executor.gate.set()
    [failed] = await node.told.wait_for("batch_failed", timeout_s=10)
    assert failed.failure.reason == "PARTITION_LOST"
    assert failed.failure.retryable
    assert failed.failure.agent_id == "a-1"
    await gateway.send("a-0", header(3), t0=x(1))
    assert (await gateway.next()).header.batch_id == 3
    assert node.engine.held_bytes == 0


async def test_an_unknown_peer_fails_the_batch_retryably(net):
    gateway, node, _ = await hosting(net)
    await gateway.send("a-0", header(agents=("a-0", "nobody")), t0=x(1))
    [failed] = await node.told.wait_for("batch_failed")
    assert (failed.failure.reason, failed.failure.agent_id) == ("PARTITION_LOST", "nobody")
    assert failed.failure.retryable


async def test_one_gateway_gone_does_not_cost_the_other_its_rows(net):
    gateway, node, _ = await hosting(net)
    gone = await net.gateway("gw-gone")
    await gone.send("a-0", header(batch_rows=2, first_row=1, gateway="gw-gone"), t0=x(2)[1:])
    await until(lambda: node.engine.held_batches == 1)
    await net.remove("gw-gone")
    net.introduce()
    await gateway.send("a-0", header(batch_rows=2), t0=x(2)[:1])
    np.testing.assert_array_equal((await gateway.next()).tensors["t1"], x(2)[:1] * 2)
    [failed] = await node.told.wait_for("batch_failed")
    assert failed.failure.agent_id == "gw-gone"


async def test_an_executor_that_raises_costs_one_batch_and_tells_nothing(net):
    gateway, node, executor = await hosting(net)
    executor.fails = RuntimeError("secret weights at 0xdeadbeef")
    await gateway.send("a-0", header(1), t0=x(1))
    [failed] = await node.told.wait_for("batch_failed")
    assert failed.failure.reason == "DEVICE_FAILED"
    assert failed.failure.retryable
    assert "secret" not in failed.failure.message
    executor.fails = None
    await gateway.send("a-0", header(2), t0=x(1))
    assert (await gateway.next()).header.batch_id == 2
    assert node.engine.held_bytes == 0


async def test_more_bytes_than_allowed_are_refused_for_now(net):
    gateway = await net.gateway()
    node = await net.agent(limits=EngineLimits(max_held_bytes=100))
    executor = node.host(0, 1)
    executor.gate.clear()
    await gateway.send("a-0", header(1, rows=4), t0=x(4))
    await entered(executor)
    await gateway.send("a-0", header(2, rows=4), t0=x(4))
    [failed] = await node.told.wait_for("batch_failed")
    assert failed.batch_id == 2
    assert (failed.failure.reason, failed.failure.retryable) == ("OVERLOADED", True)
    executor.gate.set()
    assert (await gateway.next()).header.batch_id == 1


async def test_more_unfinished_batches_than_allowed_are_refused_for_now(net):
    gateway = await net.gateway()
    node = await net.agent(limits=EngineLimits(max_assemblies=2))
    node.host(0, 1)
    for batch_id in (1, 2, 3):
        await gateway.send("a-0", header(batch_id, rows=1, batch_rows=2), t0=x(1))
    [failed] = await node.told.wait_for("batch_failed")
    assert (failed.batch_id, failed.failure.reason) == (3, "OVERLOADED")


async def test_the_loop_stays_responsive_while_the_device_computes(net):
    gateway, _, executor = await computing(net)
    # It turns while the device computes, and of its thread's time nobody else takes much.
    before_s = time.thread_time()
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert time.thread_time() - before_s < 0.1
    assert gateway.frames.empty()
    executor.gate.set()
    await gateway.next()


async def test_reports_tell_when_and_for_how_long_the_device_was_used(net):
    gateway, node, executor = await hosting(net)
    executor.takes_s = 0.05
    began = time.monotonic_ns()
    await gateway.send("a-0", header(rows=2), t0=x(2))
    [report] = await node.told.wait_for("stage_report")
    took = time.monotonic_ns() - began
    assert 50 * MS <= report.compute_ns < took
    assert report.compute_ended_ago_ns < took - 50 * MS
    assert 0 < report.transfer_ns < took
    assert report.transfer_ended_ago_ns >= report.compute_ns + report.compute_ended_ago_ns
    assert (report.batch_id, report.position, report.rows) == (1, 0, 2)


async def test_the_snapshot_tells_a_new_scheduler_what_waits_and_what_runs(net):
    gateway, node, executor = await computing(net)
    await gateway.send("a-0", header(2, start_ns=5), t0=x(1))
    await until(lambda: node.engine.held_batches == 2)
    described = {each.batch_id: each for each in node.engine.snapshot()}
    assert {batch_id: each.running for batch_id, each in described.items()} == {1: True, 2: False}
    assert described[2].remaining_ns == 5 * MS
    assert described[1].remaining_ns < 5 * MS
    assert described[2].route[0].agent_id == "a-0"
    executor.gate.set()
    await node.engine.wait_idle(5)
    assert node.engine.snapshot() == []


async def test_a_retired_partition_is_closed_after_its_last_batch(net):
    gateway, node, executor = await computing(net)
    assert node.engine.partitions.retire(executor.key)
    assert not executor.closed
    executor.gate.set()
    await gateway.next()
    await node.engine.wait_idle(5)
    assert executor.closed


async def test_other_work_is_let_in_between_batches_that_never_stop(net):
    gateway, node, executor = await hosting(net)
    executor.gate.clear()
    for batch_id in range(30):
        await gateway.send("a-0", header(batch_id, start_ns=batch_id), t0=x(1))
    await until(lambda: node.engine.held_batches == 30)
    step = asyncio.ensure_future(node.engine.on_compute_thread(lambda: len(executor.ran)))
    await asyncio.sleep(0)
    executor.gate.set()
    async with asyncio.timeout(30):
        assert 0 < await step < 30
    assert await node.engine.wait_idle(5)


async def test_close_gives_everything_back_in_the_middle_of_work(net):
    gateway, node, executor = await hosting(net)
    executor.gate.clear()
    for batch_id in range(5):
        await gateway.send("a-0", header(batch_id, start_ns=batch_id), t0=x(1))
    await entered(executor)
    await until(lambda: node.engine.held_batches == 5)
    closing = asyncio.ensure_future(node.engine.close())
    await asyncio.sleep(0)
    executor.gate.set()
    await closing
    assert node.engine.held_batches == 0
    assert node.engine.held_bytes == 0
    assert executor.closed


async def test_the_device_goes_on_while_a_result_is_still_being_pushed(net, monkeypatch):
    gateway, node, executor = await hosting(net)
    await gateway.send("a-0", header(1), t0=x(1))
    await gateway.next()
    link = await node.hub.link_to("gw-0", 1)
    may_push, pushing = asyncio.Event(), asyncio.Event()
    real = type(link).push

    async def push(self, slot, data, timeout_s):
        if self is link:
            pushing.set()
            await may_push.wait()
        await real(self, slot, data, timeout_s)

    real_try = type(link).try_push

    def try_push(self, slot, data):
        return self is not link and real_try(self, slot, data)

    monkeypatch.setattr(type(link), "push", push)
    monkeypatch.setattr(type(link), "try_push", try_push)
    for batch_id in range(2, 12):
        await gateway.send("a-0", header(batch_id, start_ns=batch_id), t0=x(1))
    await pushing.wait()
    await until(lambda: len(executor.ran) == 1 + 4 + 1)  # four wait, a fifth was computed
    await until(lambda: node.engine.received_frames == 11)
    assert await node.engine.wait_idle(0.02) is False
    assert len(executor.ran) == 6  # and no more before one of them has left
    may_push.set()
    for _ in range(10):
        await gateway.next()
    assert await node.engine.wait_idle(5)


async def test_memory_of_links_is_given_back_whatever_happens(net):
    gateway, node = await net.gateway(), await net.agent()
    executor = node.host(0, 1, width=4096, max_batch=64)
    exported = []
    link_to = node.hub.link_to

    async def watched(peer_id, timeout_s):
        link = await link_to(peer_id, timeout_s)
        if not exported:
            real, real_try = link.export, link.try_export

            async def export(nbytes, timeout_s):
                slot = await real(nbytes, timeout_s)
                exported.append(slot)
                return slot

            def try_export(nbytes):
                slot = real_try(nbytes)
                exported.append(slot)
                return slot

            return _Proxy(link, export, try_export)
        return link

    node.hub.link_to = watched
    for batch_id in range(60):
        executor.fails = RuntimeError("no") if batch_id % 3 == 1 else None
        await gateway.send("a-0", header(batch_id, rows=64), t0=x(64, width=4096))
        if batch_id % 3 == 2:
            node.engine.cancel(batch_id)
        await until(lambda sent=batch_id + 1: node.engine.received_frames == sent)
        assert await node.engine.wait_idle(5)
    assert len(exported) >= 20
    # A slot that was neither pushed nor released would still count against the link's memory:
    # 60 MiB went through, and as much must fit again at once.
    slots = [await (await link_to("gw-0", 1)).export(1 << 20, 1) for _ in range(60)]
    for slot in slots:
        slot.release()


class _Proxy:
    """A link whose exports are counted."""

    def __init__(self, link, export, try_export) -> None:
        self._link = link
        self.export, self.try_export = export, try_export

    def __getattr__(self, name):
        return getattr(self._link, name)
