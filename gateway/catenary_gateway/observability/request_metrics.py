"""Metrics, the memory of recent requests, and spans, written when a request has ended."""

from __future__ import annotations

import time
from collections import defaultdict, deque

from prometheus_client import Counter, Gauge, Histogram

from catenary_gateway.observability.generations import ObjectivesReport, SessionRecord
from catenary_gateway.observability.history import RequestHistory
from catenary_gateway.observability.outcome_kinds import OK, OutcomeKind, kind_of
from catenary_gateway.observability.outcomes import FinishedRequest, RecentOutcomes, RecentRequests
from catenary_gateway.observability.totals import ModelTotals
from catenary_gateway.observability.waterfall import bars_of
from catenary_services.telemetry import names
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.spans import AttributeValue
from catenary_services.telemetry.tracing import Tracer

_CANCELLED = "CANCELLED"
_OVERLOADS = frozenset({"OVERLOADED", "SLO_UNATTAINABLE", "QUOTA_EXCEEDED", "UNAVAILABLE"})
_OWN_BARS = "gateway."
_SLO_WINDOW = 1_000
_MOST_UNCOUNTED = 100
"""Totals are seldom asked for, and cost less for many requests at a time."""


class _Attainment:
    """The recent requests of one model. Labels are looked up once, which is most of their cost."""

    def __init__(self, share: Gauge, met: Counter, missed: Counter) -> None:
        self._met, self._missed = met, missed
        self._window: deque[bool] = deque(maxlen=_SLO_WINDOW)
        self._count = 0
        share.set_function(self._share_met)

    def observe(self, met: bool) -> None:
        if len(self._window) == _SLO_WINDOW:
            self._count -= self._window[0]
        self._window.append(met)
        self._count += met
        (self._met if met else self._missed).inc()

    def _share_met(self) -> float:
        window = len(self._window)
        return self._count / window if window else 0.0


class RequestMetrics:
    """A recorder of finished requests, which counts, remembers and traces them."""

    def __init__(self, gateway_id: str, metrics: Metrics, tracer: Tracer) -> None:
        self.gateway_id = gateway_id
        self.recent = RecentRequests()
        self.outcomes = RecentOutcomes()
        self.history = RequestHistory(time.monotonic_ns())
        self._totals: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)
        """Sums by the model's label."""
        self._uncounted: list[FinishedRequest] = []
        """Requests that the totals do not have yet."""
        self.metrics = metrics
        self.tracer = tracer
        # Looking up labels costs more than counting; models and outcomes are few.
        self._counters: dict[tuple[str, str], Counter] = {}
        self._durations: dict[str, Histogram] = {}
        self._intervals: dict[str, Histogram] = {}
        self._attainment: dict[str, _Attainment] = {}
        self._arrivals: dict[tuple[str, str], Counter] = {}
        self._by_window: dict[str, Counter] = {}

    def finished(self, request: FinishedRequest, deadline_ns: int) -> None:
        """Records a finished request.

        `deadline_ns` is its deadline on the monotonic clock.
        """
        metrics, model = self.metrics, request.model
        self.recent.add(request)
        self._uncounted.append(request)
        if len(self._uncounted) >= _MOST_UNCOUNTED:
            self._count_totals()
        self._count(model, request.outcome)
        seconds = (request.finished_ns - request.arrival.monotonic_ns) / 1e9
        if request.session is not None:
            self._count_generation(request, request.session, seconds)
        durations = self._durations.get(model)
        if durations is None:
            durations = self._durations[model] = metrics.request_seconds.labels(model)
        durations.observe(seconds)
        in_time = request.finished_ns <= deadline_ns
        if request.session is not None:
            objectives = request.session.objectives
            waited_ns = request.finished_ns - request.arrival.monotonic_ns
            is_over = request.outcome != _CANCELLED
            in_time &= objectives.met if is_over else not objectives.is_overdue(waited_ns)
        kind = kind_of(request.outcome, in_time=in_time)
        self.observe_arrival(model, kind)
        self._remember(request, kind)
        if request.arrival.trace.sampled and self.tracer.enabled:
            self._export(request)

    def sent_by_window(self, model: str) -> None:
        """Counts a request that is sent without asking the scheduler, by its model's label."""
        counter = self._by_window.get(model)
        if counter is None:
            counter = self._by_window[model] = self.metrics.window_requests.labels(model)
        counter.inc()

    def observe_arrival(self, model: str, kind: str) -> None:
        """Counts one request by what became of it, and updates the share of those in time.

        Args:
            model: The model's label; empty if it was not known yet.
            kind: A value of the label `kind`.
        """
        arrived = self._arrivals.get((model, kind))
        if arrived is None:
            arrived = self.metrics.arrivals.labels(model, kind)
            self._arrivals[model, kind] = arrived
        arrived.inc()
        if kind == names.CLIENT or not model:
            return
        attainment = self._attainment.get(model)
        if attainment is None:
            attainment = self._attainment[model] = _Attainment(
                self.metrics.slo_attainment.labels(model),
                self.metrics.slo_requests.labels(model, "true"),
                self.metrics.slo_requests.labels(model, "false"),
            )
        attainment.observe(kind == names.GOOD)

    def token_came(self, model: str, now_ns: int, previous_ns: int) -> None:
        """Counts a token of a generation, and the time since the one before it.

        Args:
            model: The model's label.
            now_ns: The present time on the monotonic clock.
            previous_ns: The time of the token before it; 0 for the first token.
        """
        self.history.add_token(model, now_ns)
        if not previous_ns:
            return
        intervals = self._intervals.get(model)
        if intervals is None:
            intervals = self._intervals[model] = self.metrics.inter_token_seconds.labels(model)
        intervals.observe((now_ns - previous_ns) / 1e9)

    def moved(self, model: str, mode: str, stall_ns: int) -> None:
        """Counts a generation that continues on another chain.

        Args:
            model: The model's label.
            mode: What was sent: "kv" or "tokens".
            stall_ns: Nanoseconds from the last token of the old chain to the first of the new one.
        """
        self.metrics.generation_moves.labels(model, mode, names.MOVED).inc()
        self.metrics.move_stall_seconds.labels(model, mode).observe(stall_ns / 1e9)

    def move_failed(self, model: str, mode: str) -> None:
        """Counts a failed move of a generation, as far as this gateway knows."""
        self.metrics.generation_moves.labels(model, mode, names.MOVE_FAILED).inc()

    def refused(self, model: str, reason: str) -> None:
        """Counts a request that was refused at the endpoint; `model` is empty if it is unknown."""
        self._count(model, reason)
        kind = kind_of(reason, in_time=True)
        self.observe_arrival(model, kind)
        now_ns = time.monotonic_ns()
        self.outcomes.add_error(model, now_ns, kind, reason)
        self.history.add(model, now_ns, kind)

    def totals(self, model: str) -> ModelTotals:
        """Returns the sums over the finished requests to a model."""
        self._count_totals()
        return self._totals[model]

    def counts(self, model: str) -> tuple[int, int]:
        """Returns how many requests to a model were answered, and how many were not."""
        answered = failed = 0
        for (label, outcome), counter in self._counters.items():
            if label != model:
                continue
            (metric,) = counter.collect()
            count = round(metric.samples[0].value)
            answered, failed = (
                (answered + count, failed) if outcome == OK else (answered, failed + count)
            )
        return answered, failed

    def _count_totals(self) -> None:
        for request in self._uncounted:
            self._totals[request.model].add(request)
        self._uncounted.clear()

    def _remember(self, request: FinishedRequest, kind: OutcomeKind) -> None:
        now_ns = request.finished_ns
        if request.outcome != OK:
            self.outcomes.add_error(request.model, now_ns, kind, request.outcome)
            self.history.add(request.model, now_ns, kind)
            return
        duration_ns = now_ns - request.arrival.monotonic_ns
        self.history.add(request.model, now_ns, kind, duration_ns)
        self.outcomes.add(request.model, now_ns, kind, duration_ns, request.rows)

    def _count(self, model: str, outcome: str) -> None:
        counter = self._counters.get((model, outcome))
        if counter is None:
            counter = self.metrics.requests.labels(model, outcome)
            self._counters[model, outcome] = counter
        counter.inc()
        if outcome in _OVERLOADS:
            self.metrics.admission_rejected.labels(outcome).inc()

    def _count_generation(
        self, request: FinishedRequest, session: SessionRecord, seconds: float
    ) -> None:
        metrics, model = self.metrics, request.model
        labels = (session.operation, names.PROVIDER, model)
        error_type = "" if request.outcome == OK else request.outcome
        metrics.generation_seconds.labels(*labels, error_type).observe(seconds)
        metrics.prompt_tokens.labels(model).inc(session.prompt_tokens)
        metrics.generation_tokens.labels(model).inc(session.completion_tokens)
        if session.finish_reason:
            metrics.generations.labels(model, session.finish_reason).inc()
        if session.first_token_ns:
            first_ns = session.first_token_ns - request.arrival.monotonic_ns
            metrics.first_token_seconds.labels(*labels).observe(first_ns / 1e9)
        if session.completion_tokens > 1:
            each_s = session.objectives.per_token_ns / 1e9
            metrics.token_seconds.labels(*labels).observe(each_s)
        if request.outcome != _CANCELLED:
            self._judge(model, session.objectives)

    def _judge(self, model: str, report: ObjectivesReport) -> None:
        """Counts the objectives that a generation met, and the errors of its predictions."""
        metrics = self.metrics
        for name, slo_ns, met, measured_ns, predicted_ns in (
            (
                names.FIRST_TOKEN,
                report.first_token_slo_ns,
                report.met_first_token,
                report.first_token_ns,
                report.predicted_first_token_ns,
            ),
            (
                names.PER_TOKEN,
                report.per_token_slo_ns,
                report.met_per_token,
                report.per_token_ns,
                report.predicted_per_token_ns,
            ),
        ):
            if slo_ns:
                metrics.token_objectives.labels(model, name, "true" if met else "false").inc()
            if measured_ns and predicted_ns:
                metrics.prediction_ratio.labels(model, name).observe(measured_ns / predicted_ns)

    def _export(self, request: FinishedRequest) -> None:
        arrival, session = request.arrival, request.session
        to_unix_ns = arrival.unix_ns - arrival.monotonic_ns
        self.tracer.record(
            context=arrival.trace,
            parent_span_id=arrival.parent_span_id,
            name=arrival.method if session is None else f"{session.operation} {request.model}",
            start_unix_ns=arrival.unix_ns,
            end_unix_ns=request.finished_ns + to_unix_ns,
            attributes={
                names.ATTRIBUTE_MODEL: request.model,
                names.ATTRIBUTE_REQUEST_ID: request.id,
                "rpc.method": arrival.method,
                **({} if session is None else _attributes(request.model, session)),
            },
            error=None if request.outcome == OK else request.outcome,
            is_call=True,
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


def _attributes(model: str, session: SessionRecord) -> dict[str, AttributeValue]:
    """Returns a span's attributes by OpenTelemetry's conventions for generative AI; no texts."""
    return {
        names.ATTRIBUTE_OPERATION: session.operation,
        names.ATTRIBUTE_PROVIDER: names.PROVIDER,
        names.ATTRIBUTE_REQUEST_MODEL: model,
        names.ATTRIBUTE_RESPONSE_MODEL: model,
        names.ATTRIBUTE_MAX_TOKENS: session.max_tokens,
        names.ATTRIBUTE_INPUT_TOKENS: session.prompt_tokens,
        names.ATTRIBUTE_OUTPUT_TOKENS: session.completion_tokens,
        names.ATTRIBUTE_FINISH_REASONS: (session.finish_reason,) if session.finish_reason else (),
        **({names.ATTRIBUTE_MOVES: session.moves} if session.moves else {}),
        **_objective_attributes(session.objectives),
    }


def _objective_attributes(report: ObjectivesReport) -> dict[str, AttributeValue]:
    """Returns the measured, wanted and predicted times in seconds, without unknown ones."""
    times_ns = {
        names.ATTRIBUTE_FIRST_TOKEN: report.first_token_ns,
        names.ATTRIBUTE_FIRST_TOKEN_SLO: report.first_token_slo_ns,
        names.ATTRIBUTE_FIRST_TOKEN_PREDICTED: report.predicted_first_token_ns,
        names.ATTRIBUTE_PER_TOKEN: report.per_token_ns,
        names.ATTRIBUTE_PER_TOKEN_SLO: report.per_token_slo_ns,
        names.ATTRIBUTE_PER_TOKEN_PREDICTED: report.predicted_per_token_ns,
    }
    return {name: duration_ns / 1e9 for name, duration_ns in times_ns.items() if duration_ns}
