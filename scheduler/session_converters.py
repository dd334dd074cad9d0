"""Messages about sessions that generate text, to events and from commands: pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from scheduler.dispatch import events
from scheduler.planning.live import GenerationCost
from scheduler.targets import CacheNeed
from services.domain.ids import (
    AgentId,
    Epoch,
    GatewayId,
    ModelKey,
    Nanoseconds,
    RequestId,
    SessionId,
)
from services.domain.plan import ChainHop
from services.errors import InvalidInput


def session_requested(
    gateway: GatewayId,
    message: scheduler_pb2.SubmitSession,
    now: Nanoseconds,
    adopted: events.AdoptedSession | None,
) -> events.SessionRequested:
    """Returns the event of a submitted request for text.

    Raises:
        InvalidInput: it has no prompt, or may generate nothing.
    """
    if message.prompt_tokens < 1:
        raise InvalidInput("prompt_tokens", "a prompt needs at least one token")
    if message.max_tokens < 1:
        raise InvalidInput("max_tokens", "must be at least 1")
    return events.SessionRequested(
        RequestId(gateway, message.request_id),
        ModelKey(message.model, message.model_version),
        message.prompt_tokens,
        message.max_tokens,
        now + message.budget_ns,
        message.priority,
        adopted,
    )


def session_failed(
    session_id: int, failure: common_pb2.Failure, agent: AgentId | None
) -> events.SessionFailed:
    """Returns the event of a session that an agent or a gateway could not go on with.

    Args:
        session_id: Which.
        failure: Why, as they said.
        agent: Who said so, if it is an agent and the failure names none.
    """
    return events.SessionFailed(
        SessionId(session_id),
        AgentId(failure.agent_id) if failure.agent_id else agent,
        failure.reason,
        failure.message,
        failure.retryable,
    )


def start_session_message(
    command: events.StartSession, epoch: Epoch, plan_id: str
) -> scheduler_pb2.SchedulerToGatewayMessage:
    """Returns the order to open a session."""
    return scheduler_pb2.SchedulerToGatewayMessage(
        start_session=scheduler_pb2.StartSession(
            epoch=epoch,
            session_id=command.session,
            request_id=command.request.number,
            plan_id=plan_id,
            route=[_chain_hop(hop) for hop in command.hops],
        )
    )


def close_sessions_message(
    sessions: Iterable[SessionId], epoch: Epoch
) -> scheduler_pb2.SchedulerToAgentMessage:
    """Returns the order to free the slots of sessions."""
    return scheduler_pb2.SchedulerToAgentMessage(
        epoch=epoch, close_sessions=scheduler_pb2.CloseSessions(session_ids=sessions)
    )


def cache_message(cache: CacheNeed) -> scheduler_pb2.CacheLayout:
    """Returns how a range of decoder blocks is to keep its caches."""
    return scheduler_pb2.CacheLayout(
        block_slots=cache.block_slots,
        session_tokens=cache.session_tokens,
        entry_blocks=cache.entry_blocks,
    )


def cost_of(message: scheduler_pb2.GenerationCost) -> GenerationCost:
    """Returns what an agent measured of decoder blocks."""
    return GenerationCost(
        message.prefill_ns, message.prefill_token_ns, message.decode_ns, message.decode_session_ns
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
