"""Requests that a real gateway sends by dispatch windows, between a scripted scheduler and an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest

from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, common_pb2, scheduler_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from gateway_harness import AGENT, Down, Stage
from shared_helpers.waiting import until

MS = 1_000_000
LONG_NS = 3_600_000 * MS
"""Longer than any test: a window of this length ends only if it is told to."""
COMPUTE_NS = [100 * MS, 110 * MS, 120 * MS, 130 * MS]
"""Longer than the agent takes for an echo, wherever this runs, or a batch would be late."""
FIRST = 1 << 40 | 1000


def request_of(value: float, rows: int = 1, **parameters: int) -> oip.ModelInferRequest:
    values = np.full((rows, 4), value, np.float32)
    request = oip.ModelInferRequest(model_name="toy", id="me")
    request.inputs.add(name="in_0", datatype="FP32", shape=values.shape)
    request.raw_input_contents.append(values.tobytes())
    for name, number in parameters.items():
        request.parameters[name].int64_param = number
    return request


def window(request: int, *, most_wait_ns: int = LONG_NS, length_ns: int = LONG_NS) -> Down:
    """The grant that answers a request, for batches of up to four rows."""
    hop = common_pb2.Hop(
        agent_id=AGENT, model="toy", model_version="1", last_block=1, reserved_start_ns=500
    )
    hops = [scheduler_pb2.WindowHop(hop=hop, ends_after_ns=length_ns, compute_ns=COMPUTE_NS)]
    return Down(
        grant_window=scheduler_pb2.GrantWindow(
            epoch=1,
            window_id=FIRST,
            plan_id="p",
            request_id=request,
            first_batch_id=FIRST + 2,
            batches=100,
            most_wait_ns=most_wait_ns,
            hops=hops,
        )
    )


@pytest.fixture
async def stub(running: Stage) -> AsyncIterator[oip_grpc.GRPCInferenceServiceStub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(running.grpc, options=options) as channel:
        yield oip_grpc.GRPCInferenceServiceStub(channel)


async def granted(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub, **terms: int
) -> scheduler_pb2.SubmitRequest:
    """Answers the first request with a batch and a window, and all others with a batch."""
    scheduler = running.scheduler

    def script(submit: scheduler_pb2.SubmitRequest) -> list[Down]:
        if submit.request_id > 1:
            return scheduler.one_batch(submit)
        return [window(submit.request_id, **terms), *scheduler.one_batch(submit)]

    scheduler.script = script
    await value_of(stub, 1.0)
    submit = await scheduler.hear("submit")
    await until(lambda: running.gateway._plane.windows.grants, "the window is there")
    return submit


async def value_of(stub: oip_grpc.GRPCInferenceServiceStub, value: float, **more: int) -> None:
    answer = await stub.ModelInfer(request_of(value, **more))
    assert set(np.frombuffer(answer.raw_output_contents[0], np.float32)) == {value}


def unsubmitted(running: Stage) -> bool:
    """Whether the scheduler has heard of no request since the last look."""
    heard = running.scheduler.heard
    kinds = [heard.get_nowait().WhichOneof("kind") for _ in range(heard.qsize())]
    return "submit" not in kinds


async def test_requests_go_by_a_window_without_a_word_to_the_scheduler(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub)
    for value in range(2, 7):
        await value_of(stub, value)
    assert unsubmitted(running)
    headers = running.agent.headers[1:]
    assert [header.batch_id for header in headers] == [FIRST + 2 + at for at in range(5)]
    assert {(header.epoch, header.plan_id, header.batch_rows) for header in headers} == {
        (1, "p", 1)
    }
    hops = [header.route[0] for header in headers]
    assert all(hop.reserved_duration_ns == COMPUTE_NS[0] for hop in hops)
    starts = [hop.reserved_start_ns for hop in hops]
    assert starts == sorted(starts)
    assert starts[0] >= 500  # on the scheduler's clock, from the beginning of the window
    registry = running.gateway._metrics.registry
    by_window = registry.get_sample_value("catenary_window_requests_total", {"model": "toy:1"})
    assert by_window == 5


async def test_requests_that_come_together_go_together(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub)
    await asyncio.gather(*(value_of(stub, value) for value in range(2, 10)))
    assert unsubmitted(running)
    headers = running.agent.headers[1:]
    assert sum(header.batch_rows for header in headers) == 8
    assert max(header.batch_rows for header in headers) <= 4


@pytest.mark.parametrize("more", [{"rows": 5}, {"priority": 1}, {"slo_ms": 1}])
async def test_what_a_window_is_not_for_is_asked_for(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub, more: dict[str, int]
) -> None:
    await granted(running, stub)
    call = asyncio.ensure_future(stub.ModelInfer(request_of(2.0, **more)))
    submit = await running.scheduler.hear("submit")
    assert not submit.in_flight
    await asyncio.gather(call, return_exceptions=True)  # a millisecond may be too short


async def test_a_revoked_window_is_used_no_more_and_says_what_it_sent(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub)
    await value_of(stub, 2.0)
    await value_of(stub, 3.0, rows=2)
    running.scheduler.send(Down(revoke_window=scheduler_pb2.RevokeWindow(window_id=FIRST)))
    report = await running.scheduler.hear("window_report")
    assert (report.window_id, report.number, report.renew) == (FIRST, 1, False)
    assert (report.first_batch_id, list(report.rows), report.requests) == (FIRST + 2, [1, 2], 2)
    assert list(report.busy_ns) == [0]
    await value_of(stub, 4.0)
    await running.scheduler.hear("submit")


async def test_lost_batches_are_submitted_again_as_lost(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub)
    running.agent.hold = True
    call = asyncio.ensure_future(value_of(stub, 2.0))
    await until(lambda: running.agent.held, "the batch is at the agent")
    running.agent.hold = False
    revoked = scheduler_pb2.RevokeWindow(window_id=FIRST, lost=True)
    running.scheduler.send(Down(revoke_window=revoked))
    submit = await running.scheduler.hear("submit")
    assert not submit.in_flight
    await call


async def test_a_late_batch_is_the_schedulers_to_watch(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub)
    running.agent.hold = True
    call = asyncio.ensure_future(value_of(stub, 2.0))
    running.scheduler.script = lambda submit: []
    submit = await running.scheduler.hear("submit")
    assert [(rows.batch_id, rows.rows) for rows in submit.in_flight] == [(FIRST + 2, 1)]
    report = await running.scheduler.hear("window_report")
    assert not report.renew
    running.agent.answer(*running.agent.held[0])
    await call
    await running.scheduler.hear("finished")  # of a request that the scheduler knows


async def test_an_agent_that_fails_a_batch_ends_the_window(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub)
    plane = running.gateway._plane
    running.agent.hold = True
    call = asyncio.ensure_future(value_of(stub, 2.0))
    await until(lambda: running.agent.held, "the batch is at the agent")
    running.agent.hold = False
    (attempt,) = plane._attempts.values()
    attempt.failed = "DEVICE_FAILED"  # as a frame of the agent says
    plane.windows.failed(attempt.batch_id)
    assert not (await running.scheduler.hear("submit")).in_flight
    assert not (await running.scheduler.hear("window_report")).renew
    await call


async def test_a_request_that_ends_by_a_window_is_none_of_the_schedulers_business(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub)
    running.agent.hold = True
    call = stub.ModelInfer(request_of(2.0))
    await until(lambda: running.agent.held, "the batch is at the agent")
    assert running.gateway._plane.waits_for(0) == []
    call.cancel()
    await until(lambda: running.gateway._plane.unanswered == 0, "the request has ended")
    assert unsubmitted(running)


async def test_more_time_is_asked_for_before_a_window_ends(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub, length_ns=2_000 * MS)
    await value_of(stub, 2.0)
    await value_of(stub, 3.0)
    report = await running.scheduler.hear("window_report")
    assert (report.renew, list(report.rows)) == (True, [1, 1])
    extended = scheduler_pb2.ExtendWindow(
        window_id=FIRST, number=report.number, ends_after_ns=[LONG_NS]
    )
    running.scheduler.send(Down(extend_window=extended))
    plane = running.gateway._plane
    await until(
        lambda: (
            plane.windows._queue.next_wakeup() is None
            or plane.windows._queue.window_of(("toy", "1")).hops[0].end_ns > LONG_NS
        ),
        "the window is longer",
    )
    await value_of(stub, 4.0)
    assert unsubmitted(running)


async def test_a_trace_says_that_a_window_was_used(
    running: Stage, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    await granted(running, stub)
    await value_of(stub, 2.0)
    async with grpc.aio.insecure_channel(running.admin) as channel:
        get = admin_pb2_grpc.AdminStub(channel).GetTrace
        trace = await get(admin_pb2.GetTraceRequest(request_id="me"))
    spans = {span.name: span for span in trace.spans}
    assert spans["gateway.window"].batch_id == FIRST + 2
    assert "gateway.queue" not in spans
