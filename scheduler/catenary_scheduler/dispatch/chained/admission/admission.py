"""Decides which requests are refused at once, and when their clients should try again."""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.events import Reject, SessionRequested
from catenary_services.domain.ids import Nanoseconds
from catenary_services.errors import (
    DeadlineExceeded,
    InvalidInput,
    NoActivePlan,
    Overloaded,
    SloUnattainable,
)


def refusal(table: SessionTable, event: SessionRequested) -> Reject | None:
    """Returns the refusal of a request that cannot be admitted; None if it can."""
    if event.in_flight is not None:  # an earlier scheduler admitted it
        return None
    model_queue = table.model_queues.get(event.model)
    fault = _fault(model_queue, event)
    if fault:
        return Reject(
            event.request,
            InvalidInput.reason,
            f"max_tokens: {fault}",
            details={"field": "max_tokens"},
            cause=table.event,
        )
    if table.plan is not None and (model_queue is None or not model_queue.served):
        return Reject(
            event.request,
            NoActivePlan.reason,
            f"no plan serves {event.model}",
            retry_after_ns=table.config.retry_after_ns,
            cause=table.event,
        )
    if event.deadline_ns <= table.now:
        return Reject(
            event.request,
            DeadlineExceeded.reason,
            "the deadline is over already",
            details={"stage": "arrival"},
            cause=table.event,
        )
    waiting = len(model_queue.waiting) if model_queue is not None else 0
    if waiting >= table.config.max_queued or len(table.sequences) >= table.config.max_requests:
        return Reject(
            event.request,
            Overloaded.reason,
            f"{waiting} requests for {event.model} wait already",
            retry_after_ns=_drained_after(table, model_queue),
            cause=table.event,
        )
    return _inadmissible(table, model_queue, event)


def _inadmissible(
    table: SessionTable, model_queue: ModelQueue | None, event: SessionRequested
) -> Reject | None:
    """Returns the refusal of a request whose objectives not even an empty worker could keep."""
    if model_queue is None or model_queue.placer is None or event.progress is not None:
        return None
    fault = model_queue.placer.fault(event, table.now)
    if fault is None:
        return None
    return Reject(
        event.request,
        SloUnattainable.reason,
        fault.message,
        details=fault.details(),
        cause=table.event,
    )


def _fault(model_queue: ModelQueue | None, event: SessionRequested) -> str:
    if event.prompt_tokens < 1 or event.max_tokens < 1:
        return "there must be a prompt, and at least one token to generate"
    limit = model_queue.session_tokens if model_queue is not None else 0
    total = event.prompt_tokens + event.max_tokens
    if limit and total > limit:
        return f"{total} tokens with the prompt are more than the {limit} of a session"
    return ""


def _drained_after(table: SessionTable, model_queue: ModelQueue | None) -> Nanoseconds:
    """Returns when the waiting requests should have started, by the observed rate."""
    expected = model_queue.drained_after_ns() if model_queue is not None else 0
    config = table.config
    return min(config.longest_retry_after_ns, max(config.retry_after_ns, expected))
