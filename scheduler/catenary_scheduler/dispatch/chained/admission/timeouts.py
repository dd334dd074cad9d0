"""Everything that happens because time has passed: deadlines, silence, and orders not obeyed."""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.admission.adoption import SessionAdoption
from catenary_scheduler.dispatch.chained.migration.evacuation import SessionEvacuation
from catenary_scheduler.dispatch.chained.migration.moving import SessionMigration
from catenary_scheduler.dispatch.chained.sessions.closing import SessionClosing
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import (
    DELIVERING,
    STARTING,
    RequestState,
)
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.events import earlier
from catenary_services.domain.ids import Nanoseconds


class SessionTimeouts:
    """Looks at what is due, and knows when the next thing is.

    Args:
        table: The state.
        closing: Ends sessions.
        ledger: Begins requests again, or answers them.
        migration: Gives up moves.
        evacuation: Tries misplaced sessions again.
        adoption: Closes sessions that nobody claims.
    """

    def __init__(
        self,
        table: SessionTable,
        closing: SessionClosing,
        ledger: RequestLedger,
        migration: SessionMigration,
        evacuation: SessionEvacuation,
        adoption: SessionAdoption,
    ) -> None:
        self._table = table
        self._closing = closing
        self._ledger = ledger
        self._migration = migration
        self._evacuation = evacuation
        self._adoption = adoption

    def on_time(self) -> None:
        """Handles everything whose time has come."""
        table = self._table
        for sequence in table.timers.due(table.now):
            self._is_due(sequence)
        if table.next_stall_look is not None and table.next_stall_look <= table.now:
            self._look_for_stalls()
        if table.unclaimed:
            self._adoption.end_claims()
        if table.moves:
            self._migration.end_moves()
        if table.misplaced:
            self._evacuation.look_at_misplaced()
        expiry = table.slots.next_expiry()
        if expiry is not None and expiry <= table.now:
            self._closing.expire()
        for model, model_queue in table.model_queues.items():
            look = model_queue.waiting.wakeup()
            if look is not None and look <= table.now:
                table.dirty[model] = None

    def next_moment(self) -> Nanoseconds | None:
        """Returns when `on_time` has something to do."""
        table = self._table
        moment = earlier(table.timers.next(), table.slots.next_expiry())
        moment = earlier(moment, table.availability.next_expiry())
        moment = earlier(moment, self._adoption.next_claim_end())
        moment = earlier(moment, self._migration.next_move_end())
        moment = earlier(moment, self._evacuation.next_misplaced())
        if table.sequences:
            moment = earlier(moment, table.next_stall_look)
        for model_queue in table.model_queues.values():
            moment = earlier(moment, model_queue.waiting.wakeup())
        return moment

    def _look_for_stalls(self) -> None:
        """Starts sessions again that get no tokens, though all their agents seem well."""
        table = self._table
        config = table.config
        running = [each for each in table.sequences.values() if each.session is not None]
        table.next_stall_look = table.now + max(1, config.stall_ns // 8) if running else None
        for sequence in running:
            session = sequence.session
            if (
                session is None or session.state is DELIVERING
            ):  # its end is awaited, with another patience
                continue
            if table.now - sequence.heard > self._longest_silence(sequence, session):
                table.counters["stalled_sessions"] += 1
                self._ledger.restart(sequence, "it got no token for too long")

    def _longest_silence(self, sequence: SequenceRequest, session: Session) -> Nanoseconds:
        config = self._table.config
        allowed = config.stall_ns
        if session.state is STARTING:
            service_ns = session.route.service_ns if session.route is not None else 0
            allowed = max(4 * allowed, round(config.prompt_factor * service_ns))
        return max(allowed, round(config.stall_factor * sequence.token_ns))

    def _is_due(self, sequence: SequenceRequest) -> None:
        table = self._table
        last = sequence.deadline + table.config.deadline_grace_ns
        session = sequence.session
        if sequence.state is RequestState.RESTING:
            self._ledger.tries_no_more(sequence)
        elif session is None and table.now < sequence.deadline:  # it rested, and waits for its turn
            table.timers.set(sequence, sequence.deadline, len(table.sequences))
        elif session is None:
            self._ledger.unstarted(sequence)
        elif table.now >= last:
            self._ledger.too_late(sequence, "in flight")
        elif sequence.check_later is not None and sequence.check_later <= table.now:
            sequence.check_later = None
            if session.state is DELIVERING:
                table.counters["undelivered_sessions"] += 1
                self._ledger.restart(sequence, "its answer was not delivered")
            elif any(hop.agent not in table.agents for hop in session.hops):
                self._ledger.restart(sequence, "one of its agents did not come back")
            else:
                table.timers.set(sequence, last, len(table.sequences))
        else:
            table.timers.set(
                sequence, min(last, sequence.check_later or last), len(table.sequences)
            )
