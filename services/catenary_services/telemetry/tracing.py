"""Traces from recorded times: spans are built after the reply, and only for sampled requests.

The gateway decides once whether a request is traced. The decision travels as a W3C traceparent in
the messages of the cluster, empty unless sampled, so that a process on the hot path only tests one
flag byte. OpenTelemetry contexts and interceptors would cost more than the request itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from catenary_services.telemetry import names
from catenary_services.telemetry.spans import AttributeValue, RecordedSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from catenary_services.telemetry.span_export import SpanExport

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FLAGS_AT = 54
"""Index of the second digit of the flags in a traceparent of any version."""
_SAMPLED_DIGITS = frozenset("13579bdf")


class TraceContext(msgspec.Struct, frozen=True):
    """A span's place in a trace: ids and sampling decision, which travel between processes."""

    trace_id: int
    span_id: int
    sampled: bool

    @property
    def traceparent(self) -> str:
        """The W3C form of the context."""
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
    """True if the sampled flag is set. Nothing else is validated: the text comes from a peer."""
    return len(traceparent) > _FLAGS_AT and traceparent[_FLAGS_AT] in _SAMPLED_DIGITS


class Tracer:
    """Decides which requests are sampled, and turns recorded times into spans.

    Without an exporter nothing is recorded, but contexts are still made and passed on.
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
        self.sample_ratio = sample_ratio
        """Share of the requests without a caller's decision that are sampled."""
        self._export: SpanExport | None = None
        if exporter is None and not otlp_endpoint:
            return
        from catenary_services.telemetry.span_export import SpanExport, otlp_exporter

        exporter = exporter or otlp_exporter(otlp_endpoint or "")
        self._export = SpanExport(service_name, instance_id, exporter)

    @property
    def enabled(self) -> bool:
        """True if recorded spans are exported."""
        return self._export is not None

    def root(self, incoming_traceparent: str | None) -> tuple[TraceContext, int | None]:
        """Returns the context of a new request's outermost span, and its parent's id if any.

        A caller's decision is kept. Without one, or with an invalid one, the ratio decides.
        """
        if incoming_traceparent:
            parent = parse_traceparent(incoming_traceparent)
            if parent is not None:
                return parent.child(), parent.span_id
        # This generator is not cryptographic, because ids need to be unique and not secret.
        sampled = self.sample_ratio > 0.0 and random.random() < self.sample_ratio
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
        is_call: bool = False,
    ) -> None:
        """Exports a span that has ended, unless it is not sampled or there is no exporter.

        Args:
            context: Ids of the span.
            parent_span_id: Id of its parent in the same trace; None for the first span.
            name: A name from `names`.
            start_unix_ns: Wall time, nanoseconds since 1970.
            end_unix_ns: Wall time; a value before `start_unix_ns` is replaced by it.
            attributes: Values by keys from `names`.
            error: Reason of its failure, e.g. "PARTITION_LOST"; None if it succeeded.
            links: Spans it belongs to without being their child (a batch and its requests).
            is_call: Whether it is a call that this process answers.
        """
        if self._export is None or not context.sampled:
            return
        facts = dict(attributes)
        if error is not None:
            facts[names.ATTRIBUTE_ERROR_TYPE] = error
        end_unix_ns = max(start_unix_ns, end_unix_ns)
        self._export.put(
            RecordedSpan(
                context,
                parent_span_id,
                name,
                start_unix_ns,
                end_unix_ns,
                facts,
                error,
                links,
                is_call,
            )
        )

    def force_flush(self, timeout_s: float = 5.0) -> bool:
        """Exports the queued spans, blocking; False if that failed or took too long."""
        return self._export is None or self._export.flush(timeout_s)

    def shutdown(self) -> None:
        """Exports the queued spans and ends the thread, blocking; later spans are dropped."""
        export, self._export = self._export, None
        if export is not None:
            export.shutdown()


def _new_id(bits: int) -> int:
    return random.getrandbits(bits) or 1
