"""Sessions of open requests, for those who look from outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.dispatch.chained.holding import SessionHolding
from scheduler.dispatch.chained.tracking import Session, Ticket
from services.domain.ids import ModelKey, RequestId, SessionId
from services.domain.plan import ChainHop


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


def view_of(session: Session, ticket: Ticket) -> SessionView:
    """Returns a session as it is now."""
    chain = session.route.chain_id if session.route is not None else ""
    move = session.moving
    if move is None:
        return SessionView(
            session.session_id, ticket.request, ticket.model, chain, session.hops, ticket.tokens,
            session.runs, was=session.was,
        )  # fmt: skip
    to = move.target.route.chain_id if move.target.route is not None else ""
    return SessionView(
        session.session_id, ticket.request, ticket.model, chain, session.hops, ticket.tokens,
        session.runs, move.target.session_id, to, move.mode, session.was,
    )  # fmt: skip


def views_of(life: SessionHolding) -> Iterator[SessionView]:
    """Yields every session that a request has, by id."""
    for session_id in sorted(life.sessions):
        session = life.sessions[session_id]
        if session.ticket is not None:
            yield view_of(session, session.ticket)
