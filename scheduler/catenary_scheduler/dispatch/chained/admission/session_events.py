"""Reports on running sessions: tokens, ends and failures."""

from __future__ import annotations

from catenary_scheduler.dispatch.breaker import AGENTS_OF_A_VERDICT, is_of_device
from catenary_scheduler.dispatch.chained.admission.preemption import SessionPreemption
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.migration.moving import SessionMigration
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.sessions.chain_offers import ChainOffers
from catenary_scheduler.dispatch.chained.sessions.closing import SessionClosing
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import (
    DELIVERING,
    ENDED,
    FIRST_TOKEN,
    MIGRATING_IN,
    STARTING,
    UNWANTED,
    SessionState,
)
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.events import (
    SessionFailed,
    SessionProgress,
    SessionsClosed,
    SessionsProgressed,
)
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import CacheFull, ComputeFailed, PartitionLost


class SessionEvents:
    """Handles what agents and gateways say of sessions.

    Args:
        table: The state.
        closing: Ends sessions.
        ledger: Begins requests again, or answers them.
        migration: Ends moves.
        preemption: Relieves chains whose sessions have grown.
        offers: Has chains used or avoided.
    """

    def __init__(
        self,
        table: SessionTable,
        closing: SessionClosing,
        ledger: RequestLedger,
        migration: SessionMigration,
        preemption: SessionPreemption,
        offers: ChainOffers,
    ) -> None:
        self._table = table
        self._closing = closing
        self._ledger = ledger
        self._migration = migration
        self._preemption = preemption
        self._offers = offers

    def progressed(self, event: SessionsProgressed) -> None:
        """Takes in tokens of sessions; what these have saved may let another request start."""
        table = self._table
        heard: dict[ModelKey, ModelQueue] = {}
        grown: dict[ChainState, ModelKey] = {}
        for progress in event.sessions:
            sequence = table.sequences.get(progress.request)
            if sequence is None or sequence.session is None:
                continue
            table.awaits_tokens(sequence)
            if progress.generated_tokens > 1:
                sequence.token_ns = progress.decode_ns // (progress.generated_tokens - 1)
            table.breakers_worked(sequence.session)
            model_queue = table.model_queue(sequence.model)
            if model_queue.placer is not None:
                model_queue.placer.loads.progressed(sequence, progress)
                heard[sequence.model] = model_queue
            if sequence.session.state is STARTING:
                self._learn_prefix(sequence, sequence.session, progress)
            self._has_tokens(sequence, sequence.session, progress.generated_tokens)
            route = sequence.session.route
            if route is not None and route.cache_tokens:
                grown[route] = sequence.model
        table.slots.contexts_grew()
        for model, model_queue in heard.items():
            if model_queue.placer is not None:
                model_queue.placer.workers.look(table.now)
            if model_queue.waiting:
                table.dirty[model] = None
        if grown:
            self._preemption.relieve_pressure(grown)

    def sessions_closed(self, event: SessionsClosed) -> None:
        """Frees slots; if nobody asked, the session is over, and the gateway should say so soon."""
        table = self._table
        for session_id in event.sessions:
            session = table.sessions.get(session_id)
            if (
                session is not None
                and session.sequence is not None
                and session.state is not DELIVERING
                and session.ends_at(event.agent)
            ):
                table.session_goes(session, ENDED, event.agent)
                table.check_later(session.sequence, table.config.delivery_grace_ns)
            self._closing.let_go(session_id, event.agent)
            move = table.moves.to(session_id)
            if move is not None:
                self._closing.fail_move(move, "closed")

    def session_failed(self, event: SessionFailed) -> None:
        """Starts the request again elsewhere, or answers it with the failure."""
        table = self._table
        session = table.sessions.get(event.session)
        if session is None or session.state is SessionState.CLOSING:
            return
        if session.state is MIGRATING_IN:
            self._migration.move_failed(session, event)
            return
        if event.reason == CacheFull.reason:
            self._preemption.cache_was_full(session, event.agent)
            return
        table.counters["failed_sessions"] += 1
        sequence = session.sequence
        if sequence is None:
            self._closing.close(session, UNWANTED, event.reason)
        elif not event.retryable:
            self._ledger.reject(sequence, event.reason, event.message)
        elif is_of_device(event.reason) and self._is_to_blame(sequence, session, event):
            table.counters["failed_requests"] += 1
            table.breakers.forgive([each for _, each in sequence.failures], table.now)
            names = " and ".join(sorted({agent for agent, _ in sequence.failures}))
            self._ledger.reject(
                sequence, ComputeFailed.reason, f"it made {names} fail: {event.message}"
            )
        else:
            self._suspect(session, event)
            self._ledger.restart(sequence, f"{event.agent or 'its gateway'}: {event.reason}")

    def _learn_prefix(
        self, sequence: SequenceRequest, session: Session, progress: SessionProgress
    ) -> None:
        """Notes that a chain has run a prompt, and how much of it the chain had before."""
        hashes, route = sequence.event.prefix_hashes, session.route
        if not hashes or route is None or progress.generated_tokens <= session.carried_tokens:
            return
        prefixes = self._table.model_queue(sequence.model).prefixes
        if progress.cached_tokens < session.believed_tokens:
            self._table.counters["lacked_prefixes"] += 1
            prefixes.lacked(route.hops, hashes, progress.cached_tokens)
        prefixes.seen(route.hops, hashes, route.room_tokens)

    def _has_tokens(
        self, sequence: SequenceRequest, session: Session, generated_tokens: int
    ) -> None:
        """Notes how many tokens of its answer a request has."""
        table = self._table
        sequence.generated_tokens = max(sequence.generated_tokens, generated_tokens)
        table.kv_budget.grows(session.session_id, sequence.tokens)
        if session.moving is not None:
            table.kv_budget.grows(session.moving.target.session_id, sequence.tokens)
        if session.state is STARTING and generated_tokens > session.carried_tokens:
            table.session_goes(session, FIRST_TOKEN)
            if session.session_id in table.misplaced:
                table.dirty[sequence.model] = None

    def _is_to_blame(
        self, sequence: SequenceRequest, session: Session, event: SessionFailed
    ) -> bool:
        """Counts a failure of a device; True if the request itself is to blame."""
        agent = event.agent
        if agent is None:
            return False
        for hop in session.hops:
            if hop.agent == agent:
                evidence = session.session_id
                self._table.breakers.failed(
                    agent, hop.partition, evidence, event.reason, self._table.now
                )
        sequence.failures += ((agent, session.session_id),)
        return len({agent for agent, _ in sequence.failures}) >= AGENTS_OF_A_VERDICT

    def _suspect(self, session: Session, event: SessionFailed) -> None:
        """Suspects the agent that is to blame, and the link over which it was not reached.

        If no agent is named, the gateway found no way into the chain, and its first agent is to
        blame. If the named agent is not on the chain, the reporting agent is to blame.
        """
        table = self._table
        agents = {hop.agent for hop in session.hops}
        blamed, told_by = event.agent, event.told_by
        if blamed is None and session.hops:
            blamed = session.hops[0].agent
        if blamed not in agents and told_by in agents:
            blamed = told_by
        changed = blamed is not None and table.backoff.failed(blamed, table.now)
        if blamed is not None and told_by is not None and {blamed, told_by} <= agents:
            is_link = blamed != told_by and event.reason == PartitionLost.reason
            changed |= is_link and table.backoff.link_failed(told_by, blamed, table.now)
        if changed:
            self._offers.refresh()
