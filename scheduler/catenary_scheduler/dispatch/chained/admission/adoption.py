"""Adopts sessions of earlier schedulers, and handles agents and gateways that come back.

After a fail-over there are three witnesses of what is in flight: the stored book, agents that say
which sessions they hold, and gateways that say which session answers a request. They come in any
order. A session is held until all three had their time; one that no gateway claims is closed, one
that an agent does not hold is started again.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.migration.moving import SessionMigration
from catenary_scheduler.dispatch.chained.sessions.closing import SessionClosing
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import (
    ADOPTED,
    CLAIMED,
    FIRST_TOKEN,
    FOUND,
    NOT_ADOPTED,
    SENT_AGAIN,
    UNWANTED,
    SessionState,
)
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.events import AdoptedSession, SessionRequested
from catenary_services.domain.ids import AgentId, Nanoseconds, SessionId


class SessionAdoption:
    """Handles sessions that are found and that this dispatcher did not start.

    Args:
        table: The state.
        closing: Ends sessions.
        ledger: Begins requests again.
        migration: Completes moves.
    """

    def __init__(
        self,
        table: SessionTable,
        closing: SessionClosing,
        ledger: RequestLedger,
        migration: SessionMigration,
    ) -> None:
        self._table = table
        self._closing = closing
        self._ledger = ledger
        self._migration = migration

    def restored(self) -> None:
        """Takes note of sessions that were entered into the book from outside."""
        table = self._table
        for session_id in table.slots.sessions():
            if session_id not in table.sessions:
                session = table.sessions[session_id] = Session(session_id, None, [])
                table.session_goes(session, FOUND, "in the stored book")
                table.unclaimed[session_id] = None

    def adopt(self, sequence: SequenceRequest, adopted: AdoptedSession) -> None:
        """Goes on with the session that answers a request; starts anew if that is not possible."""
        table = self._table
        session = self._claimable(adopted)
        if session is None:
            self._ledger.again(sequence, NOT_ADOPTED, "it is not known, or is being closed")
            return
        if session.session_id != adopted.session:  # it has moved since
            adopted = AdoptedSession(session.session_id, session.hops)
        table.unclaimed.pop(adopted.session, None)
        table.assign(session, sequence)
        table.request_goes(sequence, ADOPTED)
        table.session_goes(session, CLAIMED)
        table.counters["adopted_sessions"] += 1
        table.awaits_tokens(sequence)
        progress = sequence.event.progress
        if progress is not None:
            table.session_goes(session, FIRST_TOKEN)
        if adopted.hops:
            session.hops = adopted.hops
            session.route = table.model_queue(sequence.model).route_of(adopted.hops)
            session.route.running += 1
            placer = table.placer_of(sequence.model)
            if placer is not None:
                placer.loads.start(sequence, session.route, table.now)
                if progress is not None:
                    placer.loads.progressed(sequence, progress)
        if progress is not None:
            sequence.generated_tokens = progress.generated_tokens
        if session.route is not None:
            table.kv_budget.begins(session.session_id, [session.route], sequence.tokens)
        expires = sequence.deadline + table.config.deadline_grace_ns
        table.slots.confirm(adopted.session, expires)
        holders = set(table.slots.agents(adopted.session))
        for hop in adopted.hops:
            if hop.agent in holders:
                continue
            if hop.agent in table.agents:  # the agent has joined without it
                self._ledger.again(sequence, NOT_ADOPTED, f"{hop.agent} does not hold it")
                return
            cache = table.slots.cache(hop.agent, hop.partition)
            table.slots.correct(adopted.session, cache, hop.blocks, table.now, expires)
        if any(hop.agent not in table.agents for hop in adopted.hops):
            table.check_later(sequence, table.config.claim_grace_ns)

    def resubmitted(self, sequence: SequenceRequest, event: SessionRequested) -> None:
        """Handles a request submitted again, perhaps without its session.

        The gateway never heard of a session that it does not name.
        """
        session = sequence.session
        if session is None:
            return
        named = event.in_flight.session if event.in_flight is not None else None
        if named is not None and named in (session.session_id, session.was):
            return  # if `was`, it has moved and the gateway has no token since
        move = session.moving
        if move is not None and named == move.target.session_id:  # the move was done
            self._migration.arrived(move)
        else:
            self._ledger.again(sequence, SENT_AGAIN)

    def refused(self, adopted: AdoptedSession) -> None:
        """Closes the session of a request that was refused."""
        session = self._table.sessions.get(adopted.session)
        if session is not None and session.state is SessionState.UNCLAIMED:
            self._closing.close(session, UNWANTED, "its request was refused")

    def found(self, agent: AgentId, held: AdoptedSession) -> None:
        """Books a session that an agent holds, and closes it if its request is over."""
        table = self._table
        hops = [hop for hop in held.hops if hop.agent == agent]
        session = table.sessions.get(held.session)
        if session is None:
            if not hops:
                table.tell_to_close(agent, held.session)
                return
            session = table.sessions[held.session] = Session(held.session, None, [])
            if not self._is_ours(held.session):
                table.session_goes(session, FOUND, f"on {agent}")
                table.unclaimed[held.session] = table.now + table.config.claim_grace_ns
        if session.sequence is None and not session.hops:
            session.hops = held.hops
        expires = table.now + table.config.claim_grace_ns
        for hop in hops:
            cache = table.slots.cache(agent, hop.partition)
            table.slots.correct(held.session, cache, hop.blocks, table.now, expires)
        if session.state is SessionState.NEW:
            self._closing.close(session, UNWANTED, "its request is over")
        elif session.state is SessionState.CLOSING:
            self._closing.free(session)

    def lost(self, agent: AgentId, sessions: list[SessionId]) -> None:
        """Starts the requests of these sessions again: an agent holds nothing of them any more."""
        for session_id in sessions:
            session = self._table.sessions.get(session_id)
            move = self._table.moves.to(session_id)
            if move is not None:
                self._closing.fail_move(move, "lost")
            self._closing.let_go(session_id, agent)
            if session is not None and session.sequence is not None:
                self._ledger.restart(session.sequence, f"{agent} holds nothing of it any more")

    def end_claims(self) -> None:
        """Closes the sessions that no gateway claimed in time."""
        table = self._table
        for session_id, until in list(table.unclaimed.items()):
            if until is None:
                table.unclaimed[session_id] = table.now + table.config.claim_grace_ns
            elif until <= table.now:
                table.counters["unclaimed_sessions"] += 1
                self._closing.close(table.sessions[session_id], UNWANTED, "nobody claimed it")

    def next_claim_end(self) -> Nanoseconds | None:
        """Returns when `end_claims` has something to do."""
        return min([until or 0 for until in self._table.unclaimed.values()], default=None)

    def _is_ours(self, session: SessionId) -> bool:
        return session >= self._table.first_session

    def _claimable(self, adopted: AdoptedSession) -> Session | None:
        session = self._table.sessions.get(adopted.session)
        if session is not None and session.state is SessionState.UNCLAIMED:
            return session
        successor = self._successor(adopted.session)
        if session is not None or successor is not None:
            return successor
        if self._is_ours(adopted.session) or not adopted.hops:
            return None
        session = self._table.sessions[adopted.session] = Session(adopted.session, None, [])
        return session

    def _successor(self, session_id: SessionId) -> Session | None:
        """Returns the session that this one became before any gateway asked for it."""
        for session in self._table.sessions.values():
            if session.was == session_id and session.state is SessionState.UNCLAIMED:
                return session
        return None
