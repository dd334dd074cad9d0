"""Messages of generation to the scheduler, and its spans for the tracer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from catenary_agent.engine.reporting import FixedMessage, is_retryable
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.telemetry import names
from catenary_services.telemetry.tracing import Tracer, is_sampled, parse_traceparent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from catenary_agent.generation.state.events import MoveDone
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.generation.state.session import Session
    from catenary_services.domain.ids import PartitionKey
    from catenary_services.errors import CatenaryError


def sessions_closed(session_ids: Sequence[int]) -> FixedMessage:
    """Returns the message that sessions hold nothing here any more."""
    return FixedMessage(
        scheduler_pb2.AgentMessage(
            sessions_closed=scheduler_pb2.SessionsClosed(session_ids=session_ids)
        )
    )


def session_failed(session_id: int, error: CatenaryError, blamed: str) -> FixedMessage:
    """Returns the message that a session cannot continue.

    Args:
        session_id: The session.
        error: The error; its reason and message are sent to the scheduler.
        blamed: This agent, or the peer that could not be reached.
    """
    failure = common_pb2.Failure(
        reason=error.reason,
        message=error.message,
        agent_id=blamed,
        retryable=is_retryable(error),
    )
    return FixedMessage(
        scheduler_pb2.AgentMessage(
            session_failed=scheduler_pb2.SessionFailed(session_id=session_id, failure=failure)
        )
    )


def session_moved(done: MoveDone) -> FixedMessage:
    """Returns the message that a session was handed over."""
    move = done.move
    kv, again = scheduler_pb2.MOVE_MODE_KV, scheduler_pb2.MOVE_MODE_TOKENS
    return FixedMessage(
        scheduler_pb2.AgentMessage(
            session_moved=scheduler_pb2.SessionMoved(
                session_id=move.session_id,
                moved_session_id=move.moved_session_id,
                mode=again if move.by_tokens else kv,
                tokens=done.tokens,
                rounds=done.rounds,
                duration_ns=done.ended_ns - done.started_ns,
                held_ns=done.held_ns,
            )
        )
    )


def key_message(key: PartitionKey) -> scheduler_pb2.PartitionKey:
    """Returns the wire format of a partition's key."""
    return scheduler_pb2.PartitionKey(
        model=key.model.name,
        model_version=key.model.version,
        first_block=key.first_block,
        last_block=key.last_block,
    )


def generation_report(batcher: PartitionBatcher, sessions: int) -> FixedMessage:
    """Returns the report of what a batcher computed since the last one."""
    work = batcher.work_done
    return FixedMessage(
        scheduler_pb2.AgentMessage(
            generation_report=scheduler_pb2.GenerationReport(
                key=key_message(batcher.key),
                sessions=sessions,
                used_block_slots=batcher.used_block_slots,
                decode_steps=work.decode_steps,
                decode_rows=work.decode_rows,
                decode_context_tokens=work.decode_context_tokens,
                decode_ns=work.decode_ns,
                prefill_chunks=work.prefill_chunks,
                prefill_tokens=work.prefill_tokens,
                prefill_ns=work.prefill_ns,
                lone_steps=work.lone_steps,
                lone_context_tokens=work.lone_context_tokens,
                lone_ns=work.lone_ns,
                cached_block_tokens=batcher.executor.cached_block_tokens,
            )
        ),
        droppable=True,
    )


def record_move(tracer: Tracer, done: MoveDone, agent_id: str) -> None:
    """Records a move led here as a child span of its request, if the request is sampled."""
    opening = done.move.opening
    request = parse_traceparent(opening.traceparent)
    if request is None or not is_sampled(opening.traceparent):
        return
    to_unix = time.time_ns() - time.monotonic_ns()
    tracer.record(
        context=request.child(),
        parent_span_id=request.span_id,
        name=f"agent.{names.SPAN_MOVE}",
        start_unix_ns=done.started_ns + to_unix,
        end_unix_ns=done.ended_ns + to_unix,
        attributes={
            names.ATTRIBUTE_AGENT_ID: agent_id,
            names.ATTRIBUTE_MODEL: done.model,
            names.ATTRIBUTE_SESSION_ID: done.move.session_id,
            names.ATTRIBUTE_MOVE_MODE: done.mode,
            names.ATTRIBUTE_MOVE_ROUNDS: done.rounds,
            names.ATTRIBUTE_SESSION_TOKENS: done.tokens,
        },
    )


def record_session(tracer: Tracer, session: Session, agent_id: str, closed_ns: int) -> None:
    """Records a session's stay at this agent as a child span of its request, if sampled.

    There is one span for the stay, and inside it one each for waiting, the prompt and the tokens
    after it. A span per token would be thousands for one request.
    """
    spec = session.spec
    if not is_sampled(spec.opening.traceparent):
        return
    request = parse_traceparent(spec.opening.traceparent)
    if request is None:
        return
    to_unix = time.time_ns() - time.monotonic_ns()
    hop, own = request.child(), spec.own_hop
    prefilled_ns = session.prefilled_ns or closed_ns
    began_ns = session.first_step_ns or closed_ns
    attributes: dict[str, str | int | float | bool] = {
        names.ATTRIBUTE_AGENT_ID: agent_id,
        names.ATTRIBUTE_MODEL: own.model,
        names.ATTRIBUTE_MODEL_VERSION: own.model_version,
        names.ATTRIBUTE_BLOCKS: f"[{own.first_block},{own.last_block})",
        names.ATTRIBUTE_POSITION: spec.hop,
        names.ATTRIBUTE_SESSION_ID: spec.session_id,
        names.ATTRIBUTE_SESSION_TOKENS: session.cached,
        names.ATTRIBUTE_SESSION_STEPS: session.steps,
        names.ATTRIBUTE_COMPUTE_SECONDS: session.compute_ns * 1e-9,
    }
    parts = (
        (hop, request.span_id, names.SPAN_SESSION, session.opened_ns, closed_ns),
        (hop.child(), hop.span_id, names.SPAN_WAIT, session.opened_ns, began_ns),
        (hop.child(), hop.span_id, names.SPAN_PREFILL, began_ns, prefilled_ns),
        (hop.child(), hop.span_id, names.SPAN_DECODE, prefilled_ns, closed_ns),
    )
    for context, parent, name, start, end in parts:
        tracer.record(
            context=context,
            parent_span_id=parent,
            name=f"agent.{name}",
            start_unix_ns=start + to_unix,
            end_unix_ns=end + to_unix,
            attributes=attributes if context is hop else {},
        )
