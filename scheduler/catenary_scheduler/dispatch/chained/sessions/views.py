"""Sessions of open requests, for those who look from outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, RequestId, SessionId
from catenary_services.domain.plan import ChainHop


@dataclass(frozen=True, slots=True)
class SessionView:
    """The session that generates for a request.

    Attributes:
        session: Its id.
        request: Whose.
        model: What generates.
        chain_id: Where; empty for one that an earlier scheduler began, beside the plan.
        hops: The same.
        tokens: Prompt and answer, as reported.
        runs: Its prompt is done.
        moving_to: What it becomes, if it moves; None: it does not.
        moving_chain: Where that is.
        moving_by: "kv" or "tokens"; empty if it does not move.
        was: What it was before it moved here; None: it did not.
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
    """Returns a session as it is now."""
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


SessionState = Literal["starting", "runs", "left", "arriving", "closing", "unclaimed"]
"""It has a request and no token yet; it got tokens, so that all its agents have it; an agent said
that it is over, and its gateway is waited for; another session is to become it; its agents were
told to close it; nobody said yet whose it is."""


@dataclass(frozen=True, slots=True)
class BookedSession:
    """What the book says of a session.

    Attributes:
        session: Its id.
        request: Whose it is, or is to be; None if nobody is waited for.
        state: What for its slots are booked.
        ring: The agents that generate.
        holds: What is booked: agent, partition, block slots.
        source: Of one that is arriving: what it is now, and the agents where that is.
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
        return BookedSession(session_id, None, "closing", (), holds)
    ring = tuple(dict.fromkeys([hop.agent for hop in session.hops]))
    move, sequence = session.arriving, session.sequence
    if move is not None:
        old = tuple(dict.fromkeys([hop.agent for hop in move.source.hops]))
        source = (move.source.session_id, old)
        return BookedSession(session_id, move.sequence.request, "arriving", ring, holds, source)
    request = sequence.request if sequence is not None else None
    return BookedSession(session_id, request, _state(table, session), ring, holds)


def _state(table: SessionTable, session: Session) -> SessionState:
    if session.sequence is None:
        return "unclaimed" if session.session_id in table.unclaimed else "closing"
    if session.left or session.session_id not in table.slots:
        return "left"
    # The first token of one in two phases comes while its caches are on their way.
    return "runs" if session.runs and session.prefill is None else "starting"


def views_of(table: SessionTable) -> Iterator[SessionView]:
    """Yields every session that a request has, by id."""
    for session_id in sorted(table.sessions):
        session = table.sessions[session_id]
        if session.sequence is not None:
            yield view_of(session, session.sequence)
