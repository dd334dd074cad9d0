"""The pieces of the engine that decide something on their own."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary_agent.engine.batch import Batch, Payload
from catenary_agent.engine.inbound.assembly import Assembler
from catenary_agent.engine.partitions import LoadedPartition
from catenary_agent.engine.reporting import FixedMessage, StageDone, stage_done
from catenary_agent.hosting.measuring import interpolate, measure_between_batches
from catenary_agent.outbox import AS_BOOKED_LINGER_S, Outbox
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import InvalidInput
from catenary_services.telemetry.tracing import Tracer
from tests.support.agent_harness import MODEL, ScriptedExecutor, header, x

MS = 1_000_000


def open_batch(rows: int) -> Batch:
    executor = ScriptedExecutor(PartitionKey(MODEL, 0, 1))
    made = header(rows=rows)
    return Batch(made, made.route[0], LoadedPartition(executor, False, 64), [], [], [], 0, 1, 0, 0)


def payload(first: int, rows: int) -> tuple[Payload, list[common_pb2.Slice]]:
    values = np.arange(first, first + rows, dtype=np.float32).repeat(4).reshape(rows, 4)
    part = common_pb2.Slice(gateway_id="g", request_id=1, rows=rows, batch_row=first)
    part.request_row = first
    return Payload({"t0": values}, values.nbytes, lambda: None), [part]


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=12))
def test_frames_in_any_order_and_overlap_make_every_row_exactly_once(rows, frames):
    assembler, batch = Assembler(4), open_batch(rows)
    assembler.begin(batch)
    whole = [*((f, min(n, rows - f)) for f, n in frames if f < rows), (0, rows)]
    for first, count in whole:
        if assembler.get(batch.batch_id) is None:
            break
        tensors, slices = payload(first, count)
        assembler.add(batch, tensors, first, slices)
        assembler.take_if_complete(batch)
    [made] = batch.gather()
    np.testing.assert_array_equal(made[:, 0], np.arange(rows))
    covered = [row for s in batch.slices for row in range(s.batch_row, s.batch_row + s.rows)]
    assert covered == list(range(rows))
    assert all(s.request_row == s.batch_row for s in batch.slices)
    assert len(assembler) == 0


def test_rows_of_different_sizes_do_not_make_a_batch():
    assembler, batch = Assembler(4), open_batch(2)
    assembler.begin(batch)
    for row, width in ((0, 4), (1, 5)):
        _, slices = payload(row, 1)
        other = Payload({"t0": x(1, width=width)}, 16, lambda: None)
        if width == 4:
            assembler.add(batch, other, row, slices)
        else:
            with pytest.raises(InvalidInput):
                assembler.add(batch, other, row, slices)


def report(batch_id: int) -> StageDone:
    return StageDone(batch_id, 0, 1, 0, 1, 0, 0)


def failure(batch_id: int) -> FixedMessage:
    failed = scheduler_pb2.BatchFailed(batch_id=batch_id)
    return FixedMessage(scheduler_pb2.AgentMessage(batch_failed=failed))


class Sending:
    """Takes everything out of an outbox whenever that is due."""

    def __init__(self, outbox: Outbox, limit: int = 100) -> None:
        self.taken: list[list] = []
        self.moments_s: list[float] = []
        self._outbox, self._limit = outbox, limit
        outbox.serve(self._send)

    def _send(self) -> None:
        self.taken.append(self._outbox.take(self._limit))
        self.moments_s.append(time.monotonic())

    async def has_sent(self, times: int) -> None:
        async with asyncio.timeout(30):
            while len(self.taken) < times:
                await asyncio.sleep(0.001)


def test_a_full_outbox_drops_the_oldest_reports_and_keeps_failures():
    outbox = Outbox(capacity=10)
    outbox.put(failure(0))
    for i in range(1, 12):
        outbox.put(report(i))
    kept = outbox.take(100)
    assert kept[0].message().batch_failed.batch_id == 0
    assert [m.batch_id for m in kept[1:]] == list(range(3, 12))[-len(kept) + 1 :]
    assert len(kept) + outbox.dropped == 12
    assert len(kept) <= 10


async def test_what_comes_while_no_scheduler_leads_is_sent_to_the_next_one_in_order():
    outbox = Outbox()
    first = Sending(outbox)
    outbox.rest()
    for i in range(5):
        outbox.put(report(i))
    await asyncio.sleep(2 * AS_BOOKED_LINGER_S)
    assert first.taken == []
    second = Sending(outbox, limit=3)
    await second.has_sent(2)
    assert [[m.batch_id for m in taken] for taken in second.taken] == [[0, 1, 2], [3, 4]]
    assert first.taken == []


async def test_a_failure_takes_waiting_reports_along_at_once():
    outbox = Outbox()
    sending = Sending(outbox)
    outbox.put(report(1))
    outbox.put(failure(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [len(taken) for taken in sending.taken] == [2]
    assert not len(outbox)


@pytest.mark.parametrize(
    ("started_ns", "ended_ns", "transfer_ns", "is_as_booked"),
    [
        (0, 5 * MS, 0, True),
        (0, 4 * MS, MS // 2, True),
        (0, 5 * MS + 1, 0, False),  # longer than booked: what follows has to move
        (0, 4 * MS, 3 * MS, False),  # others wait for the link
    ],
)
def test_a_report_is_as_booked_if_nothing_has_to_move_for_it(
    started_ns, ended_ns, transfer_ns, is_as_booked
):
    batch = open_batch(1)
    batch.started_ns, batch.ended_ns, batch.transfer_ns = started_ns, ended_ns, transfer_ns
    assert stage_done(batch).is_as_booked is is_as_booked


def test_much_time_that_is_free_early_is_not_as_booked():
    batch = open_batch(1)
    batch.hop.reserved_duration_ns = 50 * MS
    batch.ended_ns = 20 * MS
    assert not stage_done(batch).is_as_booked


async def test_reports_that_all_is_as_booked_wait_longer_but_go_with_the_first_that_is_not():
    outbox = Outbox()
    sending = Sending(outbox)
    began_s = time.monotonic()
    outbox.put(report(1)._replace(is_as_booked=True))
    await sending.has_sent(1)
    assert sending.moments_s[0] - began_s >= AS_BOOKED_LINGER_S - 0.001
    others = [Outbox(), Outbox(), Outbox()]
    senders = [Sending(each) for each in others]
    kinds = {0: (True, True), 1: (True, False), 2: (False, True)}
    for number, (first, then) in kinds.items():
        others[number].put(report(10 * number)._replace(is_as_booked=first))
        others[number].put(report(10 * number + 1)._replace(is_as_booked=then))
    for number, each in enumerate(senders):
        await each.has_sent(1)
        assert [m.batch_id for m in each.taken[0]] == [10 * number, 10 * number + 1]
    assert max(senders[1].moments_s[0], senders[2].moments_s[0]) <= senders[0].moments_s[0]


def test_unmeasured_sizes_follow_the_line_of_the_measured_ones():
    assert interpolate([1, 2, 4], [10, 20, 40], 8) == (10, 20, 30, 40, 50, 60, 70, 80)
    assert interpolate([1], [7], 3) == (7, 14, 21)


async def test_measuring_ends_with_its_time_and_still_covers_every_size():
    executor = ScriptedExecutor(PartitionKey(MODEL, 0, 1))
    executor.takes_s = 0.02
    examples = staticmethod(lambda rows: [x(rows)])
    executor.ends = type("Ends", (), {"example_arrays": examples, "units": None})

    async def at_once(work):
        return await asyncio.to_thread(work)

    times = await measure_between_batches(executor, 32, at_once, budget_s=0.1)
    assert len(times) == 32
    assert list(times) == sorted(times)
    assert times[0] >= 20_000_000
    assert len(executor.ran) < 8


async def test_sampled_requests_get_a_hop_with_its_phases_and_others_get_nothing(net):
    exporter = InMemorySpanExporter()
    tracer = Tracer("agent", "a-0", exporter=exporter)
    gateway, node = await net.gateway(), await net.agent(tracer=tracer)
    node.host(0, 1).takes_s = 0.01
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8
    await gateway.send("a-0", header(1, traceparent=parent + "-00"), t0=x(1))
    await gateway.send("a-0", header(2, traceparent=parent + "-01"), t0=x(1))
    await gateway.next()
    await gateway.next()
    assert await node.engine.wait_idle(5)
    await asyncio.to_thread(tracer.force_flush)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    await asyncio.to_thread(tracer.shutdown)
    assert set(spans) == {
        "agent.hop",
        "agent.transfer",
        "agent.wait",
        "agent.compute",
        "agent.send",
    }
    hop = spans["agent.hop"]
    assert f"{hop.parent.span_id:016x}" == "cd" * 8
    assert f"{hop.context.trace_id:032x}" == "ab" * 16
    assert hop.attributes["catenary.batch.id"] == 2
    children = [s for n, s in spans.items() if n != "agent.hop"]
    assert {s.parent.span_id for s in children} == {hop.context.span_id}
    took = sum(s.end_time - s.start_time for s in children)
    assert took == hop.end_time - hop.start_time
    compute = spans["agent.compute"]
    assert compute.end_time - compute.start_time >= 10_000_000
