"""Facts that only this gateway has: its load, and the outcomes of its requests."""

from __future__ import annotations

import time
from typing import Any

from catenary_gateway.admission.request_pipeline import RequestPipeline
from catenary_gateway.endpoints.repository import server_version
from catenary_gateway.observability.outcomes import BUCKET_S, RecentOutcomes


def gateway_facts(pipeline: RequestPipeline) -> dict[str, Any]:
    """Returns the load of a gateway, and the outcomes of every model over the last minutes."""
    request_metrics, sessions = pipeline.plane.request_metrics, pipeline.sessions
    outcomes, now_ns = request_metrics.outcomes, time.monotonic_ns()
    labels = {*(model.label for model in pipeline.catalog.models()), *outcomes.models()} - {""}
    return {
        "gateway_id": pipeline.gateway_id,
        "version": server_version(),
        "ready": pipeline.readiness.ready,
        "why_not_ready": pipeline.readiness.why_not,
        "draining": pipeline.capacity.draining,
        "requests_in_flight": pipeline.plane.unanswered + sessions.unanswered,
        "sessions_running": sessions.running,
        "sessions_waiting": sessions.unanswered - sessions.running,
        "in_flight_bytes": pipeline.capacity.bytes,
        "bucket_s": BUCKET_S,
        "unnamed": model_facts(outcomes, "", now_ns),
        "models": {label: model_facts(outcomes, label, now_ns) for label in sorted(labels)},
    }


def model_facts(outcomes: RecentOutcomes, label: str, now_ns: int) -> dict[str, Any]:
    """Returns one model's outcomes; its rates are means over the time since the first of them."""
    found = outcomes.of(label, now_ns)
    # A model whose first request came a minute ago has a rate over this minute.
    seconds = max((age_s for age_s, *_ in found.history), default=0) + BUCKET_S
    return {
        "seconds": seconds if found.history else 0,
        "arrived": found.arrived,
        "good": found.good,
        "late": found.late,
        "refused": found.refused,
        "client": found.client,
        "attainment_ratio": found.attainment_ratio,
        "rows_per_s": found.rows / seconds,
        "p50_ns": found.p50_ns,
        "p99_ns": found.p99_ns,
        "errors": found.errors,
        "client_errors": found.client_errors,
        "history": found.history,
    }
