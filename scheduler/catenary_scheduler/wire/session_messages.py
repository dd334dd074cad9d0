"""Converts messages about sessions that generate text to events, and commands to messages."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.dispatch import events
from catenary_scheduler.planning.latency import WorkTotals
from catenary_scheduler.planning.live import GenerationCost
from catenary_scheduler.planning.requirements import CacheRequirement
from catenary_scheduler.wire.messages import sendable_ns, session_progress
from catenary_services.domain.ids import (
    AgentId,
    Epoch,
    GatewayId,
    ModelKey,
    Nanoseconds,
    RequestId,
    SessionId,
)
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.plan import ChainHop

_MOVE_MODES: dict[events.MoveMode, scheduler_pb2.MoveMode.ValueType] = {
    "kv": scheduler_pb2.MOVE_MODE_KV,
    "tokens": scheduler_pb2.MOVE_MODE_TOKENS,
}
_NO_MOVE = scheduler_pb2.MOVE_MODE_UNSPECIFIED


def session_requested(
    gateway: GatewayId,
    message: scheduler_pb2.SubmitSession,
    now: Nanoseconds,
    adopted: events.AdoptedSession | None = None,
    usual: TokenObjectives | None = None,
) -> events.SessionRequested:
    """Returns the event of a submitted request for text.

    Args:
        gateway: The gateway that submits it.
        message: The submitted request.
        now: The moment at which it is handled.
        adopted: The session that already generates for it; None: there is none.
        usual: Objectives of the model; they fill in for the one that the request does not name.
    """
    request = RequestId(gateway, message.request_id)
    return events.SessionRequested(
        request,
        ModelKey(message.model, message.model_version),
        message.prompt_tokens,
        message.max_tokens,
        now + message.budget_ns,
        message.priority,
        adopted,
        arrived_ns=now - message.waited_ns,
        objectives=_objectives(message, usual),
        progress=session_progress(request, message.progress)
        if message.HasField("progress")
        else None,
        prefix_hashes=tuple(message.prefix_hashes),
    )


def sessions_progressed(
    gateway: GatewayId, message: scheduler_pb2.SessionsProgressed
) -> events.SessionsProgressed:
    """Returns the event of sessions that got tokens; those without a token are left out."""
    found = (
        session_progress(RequestId(gateway, each.request_id), each) for each in message.sessions
    )
    return events.SessionsProgressed(tuple(each for each in found if each is not None))


def _objectives(
    message: scheduler_pb2.SubmitSession, usual: TokenObjectives | None
) -> TokenObjectives | None:
    named = TokenObjectives(message.first_token_slo_ns, message.per_token_slo_ns)
    if named == TokenObjectives():
        return None  # a request that asks for nothing is not refused for what its model asks
    if usual is None:
        return named
    return TokenObjectives(
        named.first_token_ns or usual.first_token_ns, named.per_token_ns or usual.per_token_ns
    )


def session_failed(
    session_id: int, failure: common_pb2.Failure, agent: AgentId | None
) -> events.SessionFailed:
    """Returns the event of a session that an agent or a gateway could not continue.

    Args:
        session_id: The session.
        failure: The reason they gave.
        agent: The agent that reports it, to blame if the failure names nobody; None: a gateway.
    """
    return events.SessionFailed(
        SessionId(session_id),
        AgentId(failure.agent_id) if failure.agent_id else agent,
        failure.reason,
        failure.message,
        failure.retryable,
        agent,
    )


def session_moved(message: scheduler_pb2.SessionMoved) -> events.SessionMoved:
    """Returns the event of a session that was handed over to another chain."""
    return events.SessionMoved(
        SessionId(message.session_id), SessionId(message.moved_session_id), message.tokens
    )


def move_mode(mode: scheduler_pb2.MoveMode.ValueType) -> events.MoveMode:
    """Returns what travels when a session moves, "kv" or "tokens"."""
    return "tokens" if mode == scheduler_pb2.MOVE_MODE_TOKENS else "kv"


def start_session_message(
    command: events.StartSession, epoch: Epoch, plan_id: str
) -> scheduler_pb2.SchedulerToGatewayMessage:
    """Returns the order to open a session."""
    objectives = command.objectives or TokenObjectives()
    return scheduler_pb2.SchedulerToGatewayMessage(
        start_session=scheduler_pb2.StartSession(
            epoch=epoch,
            session_id=command.session,
            request_id=command.request.number,
            plan_id=plan_id,
            route=[_chain_hop(hop) for hop in command.hops],
            decode_route=[_chain_hop(hop) for hop in command.decode_hops],
            first_token_slo_ns=objectives.first_token_ns,
            per_token_slo_ns=objectives.per_token_ns,
            predicted_first_token_ns=sendable_ns(command.predicted_first_token_ns),
            predicted_per_token_ns=sendable_ns(command.predicted_per_token_ns),
            moved_session_id=command.moves or 0,
            move_mode=_MOVE_MODES[command.move_mode] if command.moves else _NO_MOVE,
        )
    )


def close_sessions_message(
    sessions: Iterable[SessionId], epoch: Epoch
) -> scheduler_pb2.SchedulerToAgentMessage:
    """Returns the order to free the slots of sessions."""
    return scheduler_pb2.SchedulerToAgentMessage(
        epoch=epoch, close_sessions=scheduler_pb2.CloseSessions(session_ids=sessions)
    )


def cache_message(cache: CacheRequirement) -> scheduler_pb2.CacheLayout:
    """Returns the layout of the caches of a range of decoder blocks."""
    return scheduler_pb2.CacheLayout(
        block_slots=cache.block_slots,
        session_tokens=cache.session_tokens,
        entry_blocks=cache.entry_blocks,
        cache_tokens=cache.cache_tokens,
    )


def cost_of(message: scheduler_pb2.GenerationCost) -> GenerationCost:
    """Returns the cost that an agent measured for decoder blocks."""
    return GenerationCost(
        message.prefill_ns,
        message.prefill_token_ns,
        message.decode_ns,
        message.decode_session_ns,
        message.decode_context_token_ns,
        message.decode_lone_ns,
        message.prefill_floor_ns,
        message.prefill_chunk_tokens,
    )


def work_of(report: scheduler_pb2.GenerationReport) -> WorkTotals:
    return WorkTotals(
        report.decode_steps,
        report.decode_rows,
        report.decode_context_tokens,
        report.decode_ns,
        report.prefill_chunks,
        report.prefill_tokens,
        report.prefill_ns,
        report.lone_steps,
        report.lone_context_tokens,
        report.lone_ns,
    )


def _chain_hop(hop: ChainHop) -> common_pb2.Hop:
    model = hop.partition.model
    return common_pb2.Hop(
        agent_id=hop.agent,
        model=model.name,
        model_version=model.version,
        first_block=hop.first_block,
        last_block=hop.last_block,
    )
