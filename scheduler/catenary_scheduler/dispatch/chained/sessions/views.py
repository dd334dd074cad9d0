"""Read-only views of sessions, for callers outside the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import SessionState
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, RequestId, SessionId
from catenary_services.domain.plan import ChainHop


@dataclass(frozen=True, slots=True)
class SessionView:
    """The session that generates for a request.

    Attributes:
        session: Its id.
        request: The request.
        model: The model that generates.
        chain_id: Its chain; empty for one that an earlier scheduler began, beside the plan.
        hops: The hops of its chain.
        tokens: Tokens of prompt and answer, as reported.
        runs: True if its prompt is done.
        moving_to: The session that it becomes; None if it does not move.
        moving_chain: The chain it moves to; empty if it does not move.
        moving_by: "kv" or "tokens"; empty if it does not move.
        was: The session that it was before it moved here; None if it did not.
    """

    session: SessionId
    request: RequestId
    model: ModelKey
    chain_id: str
    hops: tuple[ChainHop, ...]
    tokens: int
    runs: bool
    moving_to: SessionId | None = None
    moving_chain: str = ""
    moving_by: str = ""
    was: SessionId | None = None


def view_of(session: Session, sequence: SequenceRequest) -> SessionView:
    """Returns the view of a session at this moment."""
    chain = session.route.chain_id if session.route is not None else ""
    move = session.moving
    if move is None:
        return SessionView(
            session.session_id,
            sequence.request,
            sequence.model,
            chain,
            session.hops,
            sequence.tokens,
            session.runs,
            was=session.was,
        )
    to = move.target.route.chain_id if move.target.route is not None else ""
    return SessionView(
        session.session_id,
        sequence.request,
        sequence.model,
        chain,
        session.hops,
        sequence.tokens,
        session.runs,
        move.target.session_id,
        to,
        move.mode,
        session.was,
    )


@dataclass(frozen=True, slots=True)
class BookedSession:
    """The bookings of a session, and their purpose.

    Attributes:
        session: Its id.
        request: The request it generates or will generate for; None if no request is waited for.
        state: The purpose of its slots: its state, but STARTING until all caches of its prompt were
            sent, DECODING also while it moves away, and DELIVERING once it holds nothing.
        ring: The agents that generate.
        holds: Its bookings: agent, partition, block slots.
        source: The session that becomes it by a move, and the agents of that; None if there is
            none.
    """

    session: SessionId
    request: RequestId | None
    state: SessionState
    ring: tuple[AgentId, ...]
    holds: tuple[tuple[AgentId, PartitionKey, int], ...]
    source: tuple[SessionId, tuple[AgentId, ...]] | None = None


def claims_of(table: SessionTable) -> list[BookedSession]:
    """Returns every session that is known or has slots, by id."""
    return [
        _claim(table, session_id)
        for session_id in sorted({*table.sessions, *table.slots.sessions()})
    ]


def _claim(table: SessionTable, session_id: SessionId) -> BookedSession:
    holds = tuple(table.slots.holds(session_id))
    session = table.sessions.get(session_id)
    if session is None:
        return BookedSession(session_id, None, SessionState.CLOSING, (), holds)
    ring = tuple(dict.fromkeys([hop.agent for hop in session.hops]))
    move, sequence, state = table.moves.to(session_id), session.sequence, session.state
    if move is not None:
        old = tuple(dict.fromkeys([hop.agent for hop in move.source.hops]))
        source = (move.source.session_id, old)
        return BookedSession(session_id, move.sequence.request, state, ring, holds, source)
    if sequence is None:
        return BookedSession(session_id, None, state, ring, holds)
    if session_id not in table.slots:
        state = SessionState.DELIVERING
    elif state is not SessionState.DELIVERING:
        # In a split phase the first token comes while the caches are still being sent.
        runs = session.runs and session.prefill is None
        state = SessionState.DECODING if runs else SessionState.STARTING
    return BookedSession(session_id, sequence.request, state, ring, holds)


def views_of(table: SessionTable) -> Iterator[SessionView]:
    """Yields every session that a request has, by id."""
    for session_id in sorted(table.sessions):
        session = table.sessions[session_id]
        if session.sequence is not None:
            yield view_of(session, session.sequence)
