"""Rows never get mixed up: whatever the cut, the order, the repetition of results."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_gateway.catalog import Catalog
from catenary_gateway.data_plane import DataPlane
from catenary_gateway.inference import InferenceOptions, InferenceRequest, RequestArrival
from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from catenary_services.errors import InternalError
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import TraceContext, Tracer
from catenary_services.transport.frames import layout, tensor_views
from catenary_services.transport.interface import NOBODY, Capabilities
from gateway_harness import GATEWAY, MODELS, ScriptedScheduler

ELSEWHERE = "gateway-other"


class Frame:
    """A frame in plain memory."""

    capabilities = Capabilities("memory", same_host=True)
    sender = NOBODY

    def __init__(self, header: bytes, payload: bytes) -> None:
        self.header = header
        self.payload = memoryview(payload)
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Slot:
    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))

    def release(self) -> None:
        pass


class Agent:
    """Link and hub in one: keeps what is pushed, and makes results of it.

    Deliveries wait by turns for the link, for memory, for the peer, and for nothing.
    """

    capabilities = Frame.capabilities
    closed = False

    def __init__(self) -> None:
        self.frames: list[tuple[frame_pb2.FrameHeader, bytes]] = []
        self.turn = 0

    def open_link(self, peer_id: str) -> Agent | None:
        self.turn = (self.turn + 1) % 4
        return None if self.turn == 1 else self

    def try_export(self, nbytes: int) -> Slot | None:
        return None if self.turn == 2 else Slot(nbytes)

    def try_push(self, slot: Slot, header: bytes) -> bool:
        if self.turn == 3:
            return False
        self.frames.append((frame_pb2.FrameHeader.FromString(header), bytes(slot.view)))
        return True

    async def link_to(self, peer_id: str, timeout_s: float) -> Agent:
        return self

    async def export(self, nbytes: int, timeout_s: float) -> Slot:
        return Slot(nbytes)

    async def push(self, slot: Slot, header: bytes, timeout_s: float) -> None:
        self.frames.append((frame_pb2.FrameHeader.FromString(header), bytes(slot.view)))

    async def close(self) -> None:
        pass


class Outbox:
    def __init__(self) -> None:
        self.messages: list[scheduler_pb2.GatewayMessage] = []

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        self.messages.append(message)

    send_soon = send

    def of(self, kind: str) -> list[object]:
        return [getattr(m, kind) for m in self.messages if m.WhichOneof("kind") == kind]


class Bench:
    """A data plane between fakes."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.catalog.update(scheduler_pb2.ModelTable(models=MODELS))
        self.agent, self.outbox = Agent(), Outbox()
        request_metrics = RequestMetrics(GATEWAY, Metrics(), Tracer("t", "t"))
        self.plane = DataPlane(self.catalog, self.outbox, self.agent, request_metrics)
        self.scheduler = ScriptedScheduler()

    def ask(self, values: np.ndarray, model: str = "toy", slo_s: float = 20) -> asyncio.Task:
        chosen = self.catalog.find(model, "")
        names = [spec.name for spec in chosen.inputs]
        request = InferenceRequest(
            chosen, "id", {names[0]: values}, len(values), (0,), InferenceOptions(int(slo_s * 1e9))
        )
        now = time.monotonic_ns()
        arrival = RequestArrival("m", now, time.time_ns(), TraceContext(1, 1, False), None)
        return asyncio.create_task(self.plane.infer(request, arrival))

    async def order(self, slices: list[tuple[int, int, int, int]], rows: int) -> int:
        order = self.scheduler.batch(slices, rows=rows)
        self.plane.dispatch(order.dispatch)
        await asyncio.gather(*self.plane._deliveries)
        return order.dispatch.batch_id


def result_of(
    frames: list[tuple[frame_pb2.FrameHeader, bytes]],
    compute: Callable[[np.ndarray], np.ndarray],
    name: str = "out_0",
) -> Frame:
    """What the last agent sends for the frames of one batch: rows of this gateway, compacted."""
    parts, slices = [], []
    for header, payload in frames:
        (values,) = tensor_views(header.tensors, memoryview(payload)).values()
        parts.append(compute(values))
        slices.extend(header.slices)
    values = np.concatenate(parts)
    tensors, nbytes = layout([(name, "FP32", values.shape)])
    payload = bytearray(nbytes)
    payload[tensors[0].offset :] = values.tobytes()
    header = frame_pb2.FrameHeader()
    header.CopyFrom(frames[0][0])
    header.kind = frame_pb2.FRAME_KIND_RESULT
    del header.slices[:], header.tensors[:]
    header.slices.extend(slices)
    header.tensors.extend(tensors)
    header.first_row, header.rows = slices[0].batch_row, len(values)
    return Frame(header.SerializeToString(), bytes(payload))


def cut(rng: random.Random, sizes: list[int]) -> list[list[tuple[int, int, int, int]]]:
    """Random batches over all rows; between slices there may be rows of another gateway."""
    pieces: list[tuple[int, int, int]] = []
    for number, size in enumerate(sizes, 1):
        row = 0
        while row < size:
            count = rng.randint(1, size - row)
            pieces.append((number, row, count))
            row += count
    rng.shuffle(pieces)
    batches: list[list[tuple[int, int, int, int]]] = []
    while pieces:
        row, batch = 0, []
        for _ in range(min(len(pieces), rng.randint(1, 4))):
            row += rng.choice([0, 0, 3])
            number, first, count = pieces.pop()
            batch.append((number, first, count, row))
            row += count
        batches.append(batch)
    return batches


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    attempts=st.integers(1, 3),
)
async def test_every_row_gets_its_own_result(sizes: list[int], seed: int, attempts: int) -> None:
    rng = random.Random(seed)
    bench = Bench()
    values = [
        np.array([[n, r, seed % 97, 1] for r in range(size)], np.float32)
        for n, size in enumerate(sizes)
    ]
    tasks = [bench.ask(value) for value in values]
    await asyncio.sleep(0)
    results: list[Frame] = []
    for _ in range(attempts):
        for batch in cut(rng, sizes):
            bench.agent.frames.clear()
            await bench.order(batch, rows=batch[-1][3] + batch[-1][2])
            results += [result_of(bench.agent.frames, lambda x: x * 2 + 1)] * rng.randint(1, 2)
    rng.shuffle(results)
    for frame in results:
        bench.plane.results.take(frame)
    for task, value in zip(tasks, values, strict=True):
        answer = await asyncio.wait_for(task, 30)
        np.testing.assert_array_equal(answer.outputs[0], value * 2 + 1)
    assert {f.request_id for f in bench.outbox.of("finished")} == set(range(1, len(sizes) + 1))
    assert not bench.outbox.of("delivery_failed")
    assert not bench.plane._requests
    assert not bench.plane._attempts
    assert all(frame.released for frame in results)


async def test_first_result_of_a_row_wins() -> None:
    bench = Bench()
    task = bench.ask(np.ones((2, 4), np.float32))
    await asyncio.sleep(0)
    await bench.order([(1, 0, 1, 0)], 1)
    await bench.order([(1, 0, 2, 0)], 2)
    first, second = ([frame] for frame in bench.agent.frames)
    bench.plane.results.take(result_of(first, lambda x: x * 10))
    bench.plane.results.take(result_of(second, lambda x: x * 20))
    answer = await task
    assert answer.outputs[0][:, 0].tolist() == [10, 20]


async def test_rows_of_a_gone_request_are_blank_and_the_others_get_theirs() -> None:
    bench = Bench()
    gone, stays = bench.ask(np.ones((2, 4), np.float32)), bench.ask(np.ones((1, 4), np.float32))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert [c.request_id for c in bench.outbox.of("cancel")] == [1]
    await bench.order([(1, 0, 2, 0), (2, 0, 1, 2)], 3)
    ((header, payload),) = bench.agent.frames
    (sent,) = tensor_views(header.tensors, memoryview(payload)).values()
    assert sent[:, 0].tolist() == [0, 0, 1]
    bench.plane.results.take(result_of(bench.agent.frames, lambda x: x + 1))
    assert (await stays).outputs[0].tolist() == [[2, 2, 2, 2]]


async def test_batch_nobody_waits_for_is_given_back() -> None:
    bench = Bench()
    await bench.order([(77, 0, 1, 0)], 1)
    (failed,) = bench.outbox.of("delivery_failed")
    assert (failed.failure.reason, failed.failure.retryable) == ("CANCELLED", True)
    assert not bench.agent.frames


async def test_requests_of_different_shapes_never_share_a_frame() -> None:
    bench = Bench()
    tasks = [bench.ask(np.ones((1, width), np.float32), "free") for width in (2, 3)]
    await asyncio.sleep(0)
    await bench.order([(1, 0, 1, 0), (2, 0, 1, 1)], 2)
    (failed,) = bench.outbox.of("delivery_failed")
    assert (failed.failure.reason, failed.failure.retryable) == ("INVALID_INPUT", False)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def tampered(frame: Frame, edit: Callable[[frame_pb2.FrameHeader], object]) -> Frame:
    header = frame_pb2.FrameHeader.FromString(frame.header)
    edit(header)
    return Frame(header.SerializeToString(), bytes(frame.payload))


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: setattr(h, "batch_id", 12345),
        lambda h: setattr(h, "kind", frame_pb2.FRAME_KIND_FEATURE_MAP),
        lambda h: setattr(h, "rows", 1),
        lambda h: setattr(h.slices[0], "request_id", 2),
        lambda h: setattr(h.slices[0], "request_row", 1),
        lambda h: setattr(h.slices[0], "batch_row", 5),
        lambda h: h.slices.append(h.slices[0]),
        lambda h: setattr(h.tensors[0], "offset", 1 << 40),
        lambda h: h.tensors[0].shape.__setitem__(0, 1),
        lambda h: h.ClearField("tensors"),
    ],
)
async def test_frames_that_do_not_fit_the_order_change_nothing(edit) -> None:
    bench = Bench()
    task = bench.ask(np.ones((2, 4), np.float32))
    other = bench.ask(np.zeros((2, 4), np.float32))
    await asyncio.sleep(0)
    await bench.order([(1, 0, 2, 0)], 2)
    good = result_of(bench.agent.frames, lambda x: x * 3)
    bad = tampered(good, edit)
    bench.plane.results.take(bad)
    assert bad.released == 1
    assert bench.plane.results.dropped == 1
    assert not task.done()
    bench.plane.results.take(Frame(b"\xff\xff", b""))
    bench.plane.results.take(good)
    assert (await task).outputs[0].tolist() == [[3] * 4] * 2
    assert not other.done()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_result_with_wrong_outputs_fails_the_request_at_once() -> None:
    bench = Bench()
    task = bench.ask(np.ones((1, 4), np.float32))
    await asyncio.sleep(0)
    await bench.order([(1, 0, 1, 0)], 1)
    bench.plane.results.take(result_of(bench.agent.frames, lambda x: x, name="other"))
    with pytest.raises(InternalError):
        await task


async def test_resubmission_names_rows_under_way_and_rows_that_are_here() -> None:
    bench = Bench()
    task = bench.ask(np.ones((5, 4), np.float32))
    await asyncio.sleep(0)
    first = await bench.order([(1, 0, 2, 0)], 2)
    frames = list(bench.agent.frames)
    second = await bench.order([(1, 2, 2, 0)], 2)
    bench.plane.results.take(result_of(frames, lambda x: x))
    bench.outbox.messages.clear()
    bench.plane.connected()
    (submit,) = bench.outbox.of("submit")
    rows = {(f.batch_id, f.request_row, f.rows) for f in submit.in_flight}
    assert rows == {(first, 0, 2), (second, 2, 2)}
    due = {f.batch_id: f.expected_after_ns for f in submit.in_flight}
    assert due[second] <= 50_000_000, "what is under way may be overdue"
    assert due[first] > 10**9, "what is here never is"
    assert 0 < submit.budget_ns < 20 * 10**9
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_failed_attempt_is_not_resubmitted_as_under_way() -> None:
    bench = Bench()
    task = bench.ask(np.ones((1, 4), np.float32))
    await asyncio.sleep(0)
    batch = await bench.order([(1, 0, 1, 0)], 1)
    failure = frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_FAILURE,
        batch_id=batch,
        failure=common_pb2.Failure(reason="PARTITION_LOST"),
    )
    bench.plane.results.take(Frame(failure.SerializeToString(), b""))
    bench.outbox.messages.clear()
    bench.plane.connected()
    assert not bench.outbox.of("submit")[0].in_flight
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
