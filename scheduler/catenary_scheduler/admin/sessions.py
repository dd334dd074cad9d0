"""Lists and moves running sessions for operators: messages to calls and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import cast

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_scheduler.dispatch.chained.sessions.views import SessionView
from catenary_scheduler.dispatch.events import MoveMode
from catenary_scheduler.inflight.session_moves import FinishedMove, OngoingMove, SessionMoves
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    GatewayId,
    ModelKey,
    RequestId,
    SessionId,
)
from catenary_services.domain.plan import ChainHop
from catenary_services.errors import InvalidInput, NotSupported

_MODES = ("kv", "tokens")


def sessions_of(
    cluster: ClusterView, request: admin_pb2.ListSessionsRequest
) -> Iterable[SessionView]:
    """Returns the sessions of a model, named with or without its version, or of all models.

    Raises:
        InvalidInput: No such model is deployed.
    """
    views = cluster.sessions()
    if not request.model:
        return views
    name, _, version = request.model.partition(":")
    model = cluster.resolve(name, version)
    if model is None:
        raise InvalidInput("model", f"{request.model!r} is not deployed")
    return [view for view in views if view.model == model]


def session_list(
    cluster: ClusterView, views: Iterable[SessionView]
) -> admin_pb2.ListSessionsResponse:
    """Returns sessions as the message that operators get."""
    return admin_pb2.ListSessionsResponse(
        sessions=[
            admin_pb2.SessionStatus(
                session_id=view.session,
                gateway_id=view.request.gateway,
                request_number=view.request.number,
                model=view.model.name,
                version=view.model.version,
                chain_id=view.chain_id,
                hops=[hop_status(hop) for hop in view.hops],
                tokens=view.tokens,
                moving_to=view.moving_chain,
                moving_by=view.moving_by,
                group=cluster.group,
                generates=view.runs,
            )
            for view in views
        ]
    )


def story_of(
    cluster: ClusterView, request: admin_pb2.GetStoryRequest
) -> admin_pb2.GetStoryResponse:
    """Returns what happened to a request and its sessions as the message that operators get.

    Raises:
        InvalidInput: No such request or session is known, or is not known any more.
        NotSupported: The request is named by the id that its client gave; only gateways know that.
    """
    if request.request_id:
        raise NotSupported("requests are known to their gateways; ask one of them")
    key: RequestId | SessionId = SessionId(request.session_id)
    if not request.session_id:
        key = RequestId(GatewayId(request.gateway_id), request.request_number)
    now, story = now_ns(), cluster.story(key)
    if not story:
        raise InvalidInput("session_id", f"{key} is not known, or is not known any more")
    return admin_pb2.GetStoryResponse(
        changes=[
            admin_pb2.StateChange(
                ago_ns=max(0, now - step.cause.at_ns),
                event=step.cause.number,
                event_kind=step.cause.kind,
                session_id=step.session,
                before=step.before,
                after=step.way.target,
                name=step.way.name,
                why=step.why,
                answers=step.answers,
            )
            for step in story
        ]
    )


async def move_session(
    moves: SessionMoves, request: admin_pb2.MoveSessionRequest, time_left_s: float
) -> admin_pb2.MoveSessionResponse:
    """Moves a session and, if that is asked for, waits for the end of it.

    Args:
        moves: The moves of the leader.
        request: The request of an operator.
        time_left_s: The answer is given within so many seconds.

    Raises:
        InvalidInput: The request names an unknown session, chain or mode.
        NotSupported: The request names no session; only gateways know requests.
        Unavailable: The session cannot be moved now; the message says why.
    """
    if not request.session_id:
        raise NotSupported("requests are known to their gateways; ask one of them")
    if request.mode and request.mode not in _MODES:
        raise InvalidInput("mode", f"{request.mode!r} is none of {', '.join(_MODES)}")
    mode = cast("MoveMode", request.mode) if request.mode else None
    begun = moves.begin(SessionId(request.session_id), request.chain_id, mode)
    wait_s = min(request.wait_ns / NANOSECONDS_PER_SECOND, time_left_s)
    ended = await moves.ended(begun, wait_s) if wait_s > 0 else FinishedMove("begun")
    return _answer(begun, ended)


def _answer(begun: OngoingMove, ended: FinishedMove) -> admin_pb2.MoveSessionResponse:
    return admin_pb2.MoveSessionResponse(
        outcome=ended.outcome,
        session_id=begun.session,
        chain_id=begun.chain_id,
        mode=begun.mode,
        tokens=ended.tokens,
        rounds=ended.rounds,
        duration_ns=ended.duration_ns,
        held_ns=ended.held_ns,
        problem=ended.problem,
    )


def hop_status(hop: ChainHop) -> admin_pb2.ChainHopStatus:
    """Returns a hop as the message that operators get."""
    return admin_pb2.ChainHopStatus(
        agent_id=hop.agent, first_block=hop.first_block, last_block=hop.last_block
    )


class SessionTotals:
    """Sums over all sessions, computed once per status message."""

    def __init__(self, views: Iterable[SessionView]) -> None:
        self.moving: Counter[ModelKey] = Counter()
        """Number of sessions that are moving to another chain, by model."""
        self.cached_tokens: Counter[str] = Counter()
        """Number of tokens of prompts and answers, by chain id."""
        for view in views:
            self.moving[view.model] += view.moving_to is not None
            self.cached_tokens[view.chain_id] += view.tokens
