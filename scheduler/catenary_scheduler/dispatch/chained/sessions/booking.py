"""Books the slots of sessions on every hop of their chains, and orders gateways to open them."""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.sessions.closing import SessionClosing
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import PLACED, PLACED_ANEW, STARTED, TAKEN_BACK
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.events import StartSession
from catenary_services.domain.ids import SessionId
from catenary_services.domain.plan import ChainHop


class SessionBooking:
    """Begins sessions.

    Args:
        table: The state.
        closing: Ends sessions.
    """

    def __init__(self, table: SessionTable, closing: SessionClosing) -> None:
        self._table = table
        self._closing = closing

    def start(self, sequence: SequenceRequest, route: ChainState) -> None:
        """Books slots on every hop and orders the gateway to open a session."""
        table = self._table
        session = self.book(sequence, route)
        table.assign(session, sequence)
        table.request_goes(sequence, PLACED, route.chain_id)
        table.session_goes(session, STARTED, route.chain_id)
        session.ordered = table.event
        session.carried_tokens = sequence.generated_tokens
        session.believed_tokens = sequence.cached().get(route.hops, 0)
        table.counters["started_sessions"] += 1
        table.awaits_tokens(sequence)
        if len(table.breakers):
            for hop in route.hops:
                table.breakers.given(hop.agent, hop.partition, table.now)
        hops = route.hops
        decode_hops: tuple[ChainHop, ...] = ()
        if route.halves is not None:
            hops, decode_hops = route.halves[0].hops, route.halves[1].hops
        first_ns = per_token_ns = 0
        objectives = sequence.event.objectives
        placer = table.placer_of(sequence.model)
        if placer is not None:
            objectives = placer.requests.objectives_of(sequence.event)
            first_ns, per_token_ns = placer.expected(sequence, route, table.now)
            placer.loads.start(sequence, route, table.now)
        table.commands.append(
            StartSession(
                session.session_id,
                sequence.request,
                route.chain_id,
                hops,
                decode_hops,
                objectives,
                first_ns,
                per_token_ns,
                cause=table.event,
            )
        )

    def book(self, sequence: SequenceRequest, route: ChainState) -> Session:
        """Returns a new session that holds slots on every hop of a route."""
        table = self._table
        session_id = SessionId(table.next_session)
        table.next_session += 1
        expires = sequence.deadline + table.config.deadline_grace_ns
        table.slots.reserve(session_id, route.claims, table.now, expires)
        session = table.sessions[session_id] = Session(session_id, route, sequence.story)
        routes = [route] if route.halves is None else list(route.halves)
        for each in routes:
            each.running += 1
        table.kv_budget.begins(session_id, routes, sequence.tokens)
        if table.slots.devices:
            prompts = route if route.halves is None else route.halves[0]
            table.slots.prompt_comes(prompts.claims, sequence.tokens, table.now)
        return session

    def unstart(self, sequence: SequenceRequest) -> None:
        """Takes back a start of which the gateway has not been told; nothing of it remains."""
        table, session = self._table, sequence.session
        if session is None:
            return
        self._closing.leaves(sequence)
        table.slots.release(session.session_id)
        waiting = table.model_queue(sequence.model).waiting
        for route in (session.prefill, session.route):
            if route is not None:
                route.running -= 1
                waiting.offer(route)
        table.kv_budget.ends(session.session_id)
        del table.sessions[session.session_id]
        table.misplaced.pop(session.session_id, None)
        table.session_goes(session, TAKEN_BACK)
        table.request_goes(sequence, PLACED_ANEW)
        sequence.session = session.sequence = None
        table.counters["started_sessions"] -= 1
        table.commands = [
            command
            for command in table.commands
            if not (isinstance(command, StartSession) and command.session == session.session_id)
        ]
