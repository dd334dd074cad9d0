from __future__ import annotations

from collections.abc import Callable

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.telemetry.tracing import TraceContext, Tracer
from scheduler_harness import Crowd, until


async def test_only_sampled_requests_have_a_span_and_carry_their_context_on(
    configured: Callable[..., SchedulerSettings], crowd: Crowd
) -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("catenary-scheduler", "s", exporter=exporter)
    process = SchedulerProcess(configured(), tracer=tracer)
    try:
        await process.start()
        gateway, _ = await crowd.serving(process.port)
        sampled = TraceContext(0xABC, 0x12, True)
        plain = TraceContext(0xDEF, 0x34, False)
        await gateway.submit(1, traceparent=sampled.traceparent)
        await gateway.submit(2, traceparent=plain.traceparent)
        first, second = await gateway.dispatched(1), await gateway.dispatched(2)
        by_request = {s.request_id: s.traceparent for b in (first, second) for s in b.slices}
        assert by_request == {1: sampled.traceparent, 2: ""}
        await gateway.finished(1)
        await until(lambda: not process.leader().gateways.sampled, "forgotten")
    finally:
        tracer.force_flush()
        await process.stop()
    (span,) = exporter.get_finished_spans()
    assert span.name == "scheduler.dispatch"
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (0xABC, 0x12)
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time >= span.start_time
