"""What remains of a request after its answer: metrics, the recent-request memory, its spans."""

from __future__ import annotations

from opentelemetry.trace import SpanKind
from prometheus_client import Counter, Histogram

from gateway.recent_requests import FinishedRequest, RecentRequests
from gateway.waterfall import bars_of
from services.telemetry import names
from services.telemetry.metrics import Metrics
from services.telemetry.tracing import Tracer

OK = "OK"
_OVERLOADS = frozenset({"OVERLOADED", "SLO_UNATTAINABLE", "QUOTA_EXCEEDED", "UNAVAILABLE"})
_OWN_BARS = "gateway."


class Bookkeeping:
    """Counts, remembers and traces finished requests."""

    def __init__(self, gateway_id: str, metrics: Metrics, tracer: Tracer) -> None:
        self.gateway_id = gateway_id
        self.recent = RecentRequests()
        self.metrics = metrics
        self.tracer = tracer
        # Looking up labels costs more than counting; models and outcomes are few.
        self._counters: dict[tuple[str, str], Counter] = {}
        self._durations: dict[str, Histogram] = {}

    def finished(self, request: FinishedRequest, deadline_ns: int) -> None:
        """Takes one finished request into account."""
        metrics, model = self.metrics, request.model
        self.recent.add(request)
        self._count(model, request.outcome)
        seconds = (request.finished_ns - request.arrival.monotonic_ns) / 1e9
        durations = self._durations.get(model)
        if durations is None:
            durations = self._durations[model] = metrics.request_seconds.labels(model)
        durations.observe(seconds)
        if request.outcome != "CANCELLED":
            met = request.outcome == OK and request.finished_ns <= deadline_ns
            metrics.observe_slo(model, met)
        if request.arrival.trace.sampled and self.tracer.enabled:
            self._export(request)

    def refused(self, model: str, reason: str) -> None:
        """Counts a request that was turned away at the door."""
        self._count(model, reason)

    def _count(self, model: str, outcome: str) -> None:
        counter = self._counters.get((model, outcome))
        if counter is None:
            counter = self.metrics.requests.labels(model, outcome)
            self._counters[model, outcome] = counter
        counter.inc()
        if outcome in _OVERLOADS:
            self.metrics.admission_rejected.labels(outcome).inc()

    def _export(self, request: FinishedRequest) -> None:
        arrival = request.arrival
        to_unix_ns = arrival.unix_ns - arrival.monotonic_ns
        self.tracer.record(
            context=arrival.trace,
            parent_span_id=arrival.parent_span_id,
            name=arrival.method,
            start_unix_ns=arrival.unix_ns,
            end_unix_ns=request.finished_ns + to_unix_ns,
            attributes={
                names.ATTRIBUTE_MODEL: request.model,
                names.ATTRIBUTE_REQUEST_ID: request.id,
                "rpc.method": arrival.method,
            },
            error=None if request.outcome == OK else request.outcome,
            kind=SpanKind.SERVER,
        )
        for bar in bars_of(request, self.gateway_id):
            # Agents and the scheduler export their own spans, from their own clocks.
            if not bar.name.startswith(_OWN_BARS):
                continue
            self.tracer.record(
                context=arrival.trace.child(),
                parent_span_id=arrival.trace.span_id,
                name=bar.name,
                start_unix_ns=bar.start_ns + to_unix_ns,
                end_unix_ns=max(bar.start_ns, bar.end_ns) + to_unix_ns,
                attributes={
                    names.ATTRIBUTE_BATCH_ID: bar.batch_id,
                    names.ATTRIBUTE_ATTEMPT: bar.attempt,
                },
            )
