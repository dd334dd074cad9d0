"""Traces from recorded times: spans are built after the reply, and only for sampled requests.

The gateway decides once whether a request is traced; the decision travels as a W3C traceparent in
our own envelopes, empty unless sampled. On the hot path a process only tests one flag byte. No
OpenTelemetry context, no interceptors: those cost more than the request (see the ADR on tracing).
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from catenary_services.telemetry import names

AttributeValue = str | bool | int | float | tuple[str, ...]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FLAGS_AT = 54
"""Where the second digit of the flags is in a traceparent of any version."""
_SAMPLED_DIGITS = frozenset("13579bdf")
_MAX_QUEUED_SPANS = 8_192


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place in a trace, as it travels."""

    trace_id: int
    span_id: int
    sampled: bool

    @property
    def traceparent(self) -> str:
        """W3C form."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        """Returns the context of a new span below this one."""
        return TraceContext(self.trace_id, _new_id(64), self.sampled)


def parse_traceparent(text: str) -> TraceContext | None:
    """Returns the context, or None if `text` is not a valid traceparent."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    release, trace, span, flags, rest = match.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    # Version 00 has nothing behind the flags; later ones may. ff and zero ids are invalid.
    if release == "ff" or (release == "00" and rest) or not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def is_sampled(traceparent: str) -> bool:
    """True if the flag byte says so. For our own envelopes: validates nothing else."""
    return len(traceparent) > _FLAGS_AT and traceparent[_FLAGS_AT] in _SAMPLED_DIGITS


class Tracer:
    """Decides what is sampled, and turns recorded times into spans.

    Without an exporter nothing is recorded, but contexts are still made and passed on. Spans are
    exported by a thread, from a bounded queue that drops the oldest when full.
    """

    def __init__(
        self,
        service_name: str,
        instance_id: str,
        *,
        otlp_endpoint: str | None = None,
        sample_ratio: float = 0.01,
        exporter: SpanExporter | None = None,
    ) -> None:
        if exporter is None and otlp_endpoint:
            exporter = _otlp_exporter(otlp_endpoint)
        self._ratio = sample_ratio
        self._processor: BatchSpanProcessor | None = None
        if exporter is None:
            return
        release = _release()
        self._scope = InstrumentationScope("catenary", release)
        # `create` adds OTEL_RESOURCE_ATTRIBUTES, which collectors' users rely on.
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

    @property
    def enabled(self) -> bool:
        """True if recorded spans go anywhere."""
        return self._processor is not None

    def root(self, incoming_traceparent: str | None) -> tuple[TraceContext, int | None]:
        """Returns the context of a new request's outermost span, and its parent's id if any.

        A caller's decision is kept; without one (or an invalid one) the ratio decides.
        """
        if incoming_traceparent:
            parent = parse_traceparent(incoming_traceparent)
            if parent is not None:
                return parent.child(), parent.span_id
        # A generator seeded by the system: ids need to be unique, not secret.
        sampled = self._ratio > 0.0 and random.random() < self._ratio
        return TraceContext(_new_id(128), _new_id(64), sampled), None

    def record(  # noqa: PLR0913 - one span is that many facts, all by keyword
        self,
        *,
        context: TraceContext,
        parent_span_id: int | None,
        name: str,
        start_unix_ns: int,
        end_unix_ns: int,
        attributes: Mapping[str, AttributeValue],
        error: str | None = None,
        links: Sequence[TraceContext] = (),
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        """Exports a span that has ended; nothing happens without an exporter or if not sampled.

        Args:
            context: Its own ids.
            parent_span_id: In the same trace; None for the first span.
            name: From `names`.
            start_unix_ns: Wall time, nanoseconds since 1970.
            end_unix_ns: Wall time; never before `start_unix_ns` (moved there if it is).
            attributes: Keys from `names`.
            error: Reason it failed, e.g. "PARTITION_LOST"; None if it did not.
            links: Spans it belongs to without being their child (a batch and its requests).
            kind: Whether it serves or makes a call.
        """
        processor = self._processor
        if processor is None or not context.sampled:
            return
        facts = dict(attributes)
        if error is not None:
            facts[names.ATTRIBUTE_ERROR_TYPE] = error
        parent = None
        if parent_span_id is not None:
            parent = _span_context(context.trace_id, parent_span_id, is_remote=True)
        processor.on_end(
            ReadableSpan(
                name=name,
                context=_span_context(context.trace_id, context.span_id, is_remote=False),
                parent=parent,
                resource=self._resource,
                attributes=facts,
                links=[
                    Link(_span_context(link.trace_id, link.span_id, is_remote=True))
                    for link in links
                ],
                kind=kind,
                status=Status(StatusCode.UNSET)
                if error is None
                else Status(StatusCode.ERROR, error),
                start_time=start_unix_ns,
                end_time=max(start_unix_ns, end_unix_ns),
                instrumentation_scope=self._scope,
            )
        )

    def force_flush(self, timeout_s: float = 5.0) -> bool:
        """Exports what is queued, blocking; False if that failed or took too long."""
        if self._processor is None:
            return True
        return bool(self._processor.force_flush(int(timeout_s * 1000)))

    def shutdown(self) -> None:
        """Exports what is queued and ends the thread, blocking; later spans are dropped."""
        if self._processor is not None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            self._processor = None


def _span_context(trace_id: int, span_id: int, *, is_remote: bool) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _new_id(bits: int) -> int:
    return random.getrandbits(bits) or 1


def _release() -> str:
    try:
        return version("catenary")
    except PackageNotFoundError:
        return "0"


def _otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=5
    )
