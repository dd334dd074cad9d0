"""Facts that only this gateway has: its load, the outcomes of its requests, what it offers."""

from __future__ import annotations

import time
from typing import Any

from catenary_gateway.admission.request_pipeline import RequestPipeline
from catenary_gateway.catalog import Model
from catenary_gateway.observability.history import STEP_S, STEPS, HistoryStep
from catenary_gateway.observability.outcomes import BUCKET_S, RecentOutcomes
from catenary_services.domain.tensors import TensorSpec
from catenary_services.version import software_version


def gateway_facts(pipeline: RequestPipeline) -> dict[str, Any]:
    """Returns the load of a gateway, and the outcomes of every model over the last minutes."""
    request_metrics, sessions = pipeline.plane.request_metrics, pipeline.sessions
    outcomes, now_ns = request_metrics.outcomes, time.monotonic_ns()
    labels = {*(model.label for model in pipeline.catalog.models()), *outcomes.models()} - {""}
    return {
        "gateway_id": pipeline.gateway_id,
        "version": software_version(),
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


def history_facts(pipeline: RequestPipeline) -> dict[str, Any]:
    """Returns the last hour of every model: a row for each step in which anything happened.

    The first column is the number of steps between the one that ended last and the row's.
    """
    history, now_ns = pipeline.plane.request_metrics.history, time.monotonic_ns()
    latest = now_ns // (STEP_S * 1_000_000_000) - 1
    return {
        "gateway_id": pipeline.gateway_id,
        "step_s": STEP_S,
        "steps": STEPS,
        "covered_s": history.covered_s(now_ns),
        "columns": ("age", *HistoryStep._fields[1:]),
        "models": {
            label: [(latest - number, *counts) for number, *counts in history.of(label, now_ns)]
            for label in sorted(history.models())
        },
    }


def model_offers(pipeline: RequestPipeline) -> dict[str, Any]:
    """Returns the signature of every model, and whether requests need a key."""
    return {
        "needs_key": pipeline.keys.enabled,
        "models": [_offer(pipeline, model) for model in pipeline.catalog.models()],
    }


def _offer(pipeline: RequestPipeline, model: Model) -> dict[str, Any]:
    codec = pipeline.codecs.known(model.key) if model.generates else None
    return {
        "name": model.key.name,
        "version": model.key.version,
        "ready": model.ready,
        "reason": model.not_ready_reason,
        "generates": model.generates,
        # None while the tokenizer is not read yet.
        "chats": codec.chats if codec is not None else None,
        "session_tokens": model.session_tokens,
        "inputs": [_tensor(spec) for spec in model.inputs],
        "outputs": [_tensor(spec) for spec in model.outputs],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
