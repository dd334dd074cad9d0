"""Waterfalls of finished requests, drawn from the times recorded along their way.

Times of the gateway are of its own clock. Agents report durations only, so their bars are laid end
to end from the moment the rows were pushed; the rest until the result came in is `gateway.return`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from catenary_gateway.observability.generations import WaterfallSpan
from catenary_gateway.observability.outcomes import FinishedRequest
from catenary_gateway.results.pending import BatchAttempt
from catenary_protos.catenary.v1 import admin_pb2


def bars_of(request: FinishedRequest, gateway_id: str) -> list[WaterfallSpan]:
    """Returns the waterfall of a request, in the order of attempts and hops."""
    bars: list[WaterfallSpan] = []
    arrived_ns = request.arrival.monotonic_ns
    submitted_ns = request.submitted_ns or request.finished_ns
    bars.append(WaterfallSpan("gateway.receive", gateway_id, arrived_ns, submitted_ns))
    if request.session is not None:
        bars.extend(request.session.bars)
        return _until(request.finished_ns, bars)
    waiting_ns = submitted_ns
    if not request.attempts:
        bars.append(WaterfallSpan("gateway.queue", gateway_id, submitted_ns, request.finished_ns))
    for number, attempt in enumerate(request.attempts, 1):
        dispatched_ns = min(attempt.dispatched_ns, request.finished_ns)
        batch = attempt.batch_id
        name = "gateway.window" if attempt.window else "gateway.queue"
        bars.append(WaterfallSpan(name, gateway_id, waiting_ns, dispatched_ns, batch, number))
        waiting_ns = dispatched_ns
        if attempt.sent_ns:
            bars.append(
                WaterfallSpan(
                    "gateway.send", gateway_id, dispatched_ns, attempt.sent_ns, batch, number
                )
            )
        bars.extend(_hops(attempt, gateway_id, number))
    # A batch shared with other requests may go on after this one was answered.
    return _until(request.finished_ns, bars)


def _until(end_ns: int, bars: list[WaterfallSpan]) -> list[WaterfallSpan]:
    return [
        replace(bar, start_ns=min(bar.start_ns, end_ns), end_ns=min(bar.end_ns, end_ns))
        for bar in bars
    ]


def trace_of(request: FinishedRequest, gateway_id: str) -> admin_pb2.GetTraceResponse:
    """Returns a request's trace as the answer of `Admin.GetTrace`."""
    arrived_ns = request.arrival.monotonic_ns
    trace = request.arrival.trace
    return admin_pb2.GetTraceResponse(
        request_id=request.id,
        model=request.model,
        outcome=request.outcome,
        total_ns=request.finished_ns - arrived_ns,
        trace_id=f"{trace.trace_id:032x}",
        spans=[
            admin_pb2.TraceSpan(
                name=bar.name,
                process=bar.process,
                start_ns=max(0, bar.start_ns - arrived_ns),
                duration_ns=max(0, bar.end_ns - bar.start_ns),
                batch_id=bar.batch_id,
                attempt=bar.attempt,
            )
            for bar in bars_of(request, gateway_id)
        ],
    )


def _hops(attempt: BatchAttempt, gateway_id: str, number: int) -> Iterator[WaterfallSpan]:
    if not attempt.result_ns:
        return
    at_ns = attempt.push_ns or attempt.dispatched_ns
    for timing in attempt.timings:
        for name, duration_ns in timing.phases:
            # Clocks of machines drift apart, so a bar is cut at the time of the result.
            end_ns = min(at_ns + duration_ns, max(at_ns, attempt.result_ns))
            yield WaterfallSpan(name, timing.agent_id, at_ns, end_ns, attempt.batch_id, number)
            at_ns = end_ns
    yield WaterfallSpan(
        "gateway.return", gateway_id, at_ns, attempt.result_ns, attempt.batch_id, number
    )
    yield WaterfallSpan(
        "gateway.merge", gateway_id, attempt.result_ns, attempt.merged_ns, attempt.batch_id, number
    )
