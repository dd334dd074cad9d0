from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

from catenary_services.telemetry.tracing import TraceContext, Tracer, is_sampled, parse_traceparent
from shared_helpers.grpc_servers import listening

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_traceparent_round_trips(trace_id: int, span_id: int, sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, sampled)
    assert parse_traceparent(context.traceparent) == context
    assert is_sampled(context.traceparent) is sampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        PARENT[:-1],
        PARENT + "0",
        PARENT + "-extra",
        "ff" + PARENT[2:],
        PARENT.upper(),
        " " + PARENT,
        PARENT.replace("-", "_"),
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + "-01",
    ],
)
def test_invalid_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_later_versions_are_read_as_far_as_known() -> None:
    context = parse_traceparent("01" + PARENT[2:] + "-more")
    assert context is not None
    assert context.sampled


@pytest.mark.parametrize("flags", [f"{number:02x}" for number in range(256)])
def test_flag_test_agrees_with_the_parser(flags: str) -> None:
    text = PARENT[:-2] + flags
    context = parse_traceparent(text)
    assert context is not None
    assert is_sampled(text) is context.sampled is bool(int(flags, 16) & 1)


@given(st.text(max_size=60))
def test_flag_test_never_raises(text: str) -> None:
    assert is_sampled(text) in (True, False)


def test_form_is_the_one_opentelemetry_reads() -> None:
    from opentelemetry import trace

    context = TraceContext(2**127 + 1, 5, True)
    carried = {"traceparent": context.traceparent}
    seen = trace.get_current_span(
        TraceContextTextMapPropagator().extract(carried)
    ).get_span_context()
    assert (seen.trace_id, seen.span_id, seen.trace_flags.sampled) == (2**127 + 1, 5, True)


def test_child_stays_in_the_trace() -> None:
    context = TraceContext(1, 2, True)
    child = context.child()
    assert (child.trace_id, child.sampled) == (1, True)
    assert child.span_id not in (0, 2)


def test_callers_decision_is_kept() -> None:
    never, always = Tracer("g", "g", sample_ratio=0.0), Tracer("g", "g", sample_ratio=1.0)
    context, parent = never.root(PARENT)
    assert (context.trace_id, parent) == (int(PARENT[3:35], 16), int(PARENT[36:52], 16))
    assert context.sampled
    assert context.span_id != parent
    assert not always.root(UNSAMPLED)[0].sampled


def test_ratio_decides_without_a_caller() -> None:
    for ratio, low, high in ((0.0, 0, 0), (1.0, 2000, 2000), (0.5, 800, 1200)):
        tracer = Tracer("g", "g", sample_ratio=ratio)
        roots = [tracer.root("nonsense") for _ in range(2000)]
        assert all(parent is None for _, parent in roots)
        assert low <= sum(context.sampled for context, _ in roots) <= high
        assert len({context.trace_id for context, _ in roots}) == 2000


def record(
    tracer: Tracer, context: TraceContext, parent: int | None = None, **more: object
) -> None:
    facts = {
        "name": "hop",
        "start_unix_ns": 1_000,
        "end_unix_ns": 3_000,
        "attributes": {"catenary.model": "m", "catenary.batch.rows": 4},
        **more,
    }
    tracer.record(context=context, parent_span_id=parent, **facts)  # type: ignore[arg-type]


def test_recorded_span_has_exactly_these_ids_and_times() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("catenary-agent", "agent-0", exporter=exporter)
    context, link = TraceContext(7, 8, True), TraceContext(9, 10, True)
    record(tracer, context, 6, error="PARTITION_LOST", links=[link])
    assert tracer.force_flush()
    (span,) = exporter.get_finished_spans()
    assert (span.context.trace_id, span.context.span_id) == (7, 8)
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (7, 6)
    assert (span.name, span.start_time, span.end_time) == ("hop", 1_000, 3_000)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes == {
        "catenary.model": "m",
        "catenary.batch.rows": 4,
        "error.type": "PARTITION_LOST",
    }
    assert [(it.context.trace_id, it.context.span_id) for it in span.links] == [(9, 10)]
    resource = span.resource.attributes
    assert resource["service.name"] == "catenary-agent"
    assert resource["service.instance.id"] == "agent-0"
    tracer.shutdown()


def test_nothing_is_recorded_unless_sampled_or_after_shutdown() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("g", "g", exporter=exporter)
    record(tracer, TraceContext(1, 2, False))
    tracer.shutdown()
    record(tracer, TraceContext(1, 2, True))
    tracer.shutdown()
    assert exporter.get_finished_spans() == ()


def test_without_an_exporter_everything_is_a_no_op() -> None:
    tracer = Tracer("g", "g")
    assert not tracer.enabled
    record(tracer, TraceContext(1, 2, True))
    assert tracer.force_flush()
    tracer.shutdown()


def test_end_never_lies_before_the_start() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("g", "g", exporter=exporter)
    record(tracer, TraceContext(1, 2, True), end_unix_ns=500)
    tracer.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.end_time == span.start_time


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    async def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: grpc.aio.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    servicer = Collector()
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    async with listening(add, servicer) as address:
        yield servicer, f"http://{address}"


async def test_spans_reach_an_otlp_collector_as_one_tree(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    tracer = Tracer("gateway", "gateway-0", otlp_endpoint=endpoint, sample_ratio=1.0)
    root, _ = tracer.root(None)
    hop = root.child()
    record(tracer, hop, root.span_id, links=[root])
    record(tracer, root, name="request")
    await asyncio.wait_for(asyncio.to_thread(tracer.shutdown), 20)
    spans = {
        span.name: span
        for request in servicer.requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert set(spans) == {"hop", "request"}
    assert spans["hop"].parent_span_id == spans["request"].span_id
    assert spans["hop"].trace_id == spans["request"].trace_id == root.trace_id.to_bytes(16, "big")
    assert spans["request"].parent_span_id == b""
    assert len(spans["hop"].links) == 1
