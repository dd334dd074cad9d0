"""Spans as OpenTelemetry's SDK has them, and their export by a thread.

The SDK takes several megabytes, so this module is imported only by processes that export spans.
"""

from __future__ import annotations

import socket

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from catenary_services.telemetry.spans import RecordedSpan
from catenary_services.version import software_version

_MAX_QUEUED_SPANS = 8_192


class SpanExport:
    """Exports spans of one process, from a bounded queue that drops the oldest when full."""

    def __init__(self, service_name: str, instance_id: str, exporter: SpanExporter) -> None:
        release = software_version()
        self._scope = InstrumentationScope("catenary", release)
        # `create` adds OTEL_RESOURCE_ATTRIBUTES, which users of collectors rely on.
        self._resource = Resource.create(
            {
                "service.name": service_name,
                "service.instance.id": instance_id,
                "service.version": release,
                "host.name": socket.gethostname(),
            }
        )
        self._processor = BatchSpanProcessor(
            exporter, max_queue_size=_MAX_QUEUED_SPANS, schedule_delay_millis=1_000
        )

    def put(self, span: RecordedSpan) -> None:
        """Queues a span."""
        context, error = span.context, span.error
        parent = None
        if span.parent_span_id is not None:
            parent = _span_context(context.trace_id, span.parent_span_id, is_remote=True)
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=_span_context(context.trace_id, context.span_id, is_remote=False),
                parent=parent,
                resource=self._resource,
                attributes=span.attributes,
                links=[
                    Link(_span_context(link.trace_id, link.span_id, is_remote=True))
                    for link in span.links
                ],
                kind=SpanKind.SERVER if span.is_call else SpanKind.INTERNAL,
                status=Status(StatusCode.UNSET)
                if error is None
                else Status(StatusCode.ERROR, error),
                start_time=span.start_unix_ns,
                end_time=span.end_unix_ns,
                instrumentation_scope=self._scope,
            )
        )

    def flush(self, timeout_s: float) -> bool:
        """Exports the queued spans, blocking; False if that failed or took too long."""
        return bool(self._processor.force_flush(int(timeout_s * 1000)))

    def shutdown(self) -> None:
        """Exports the queued spans and ends the thread, blocking."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Returns what sends spans to a collector."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=5
    )


def _span_context(trace_id: int, span_id: int, *, is_remote: bool) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))
