"""The way from request to answer: what each event does to requests, sessions and slots."""

from __future__ import annotations

from catenary_scheduler.dispatch.breaker import AGENTS_OF_A_VERDICT, is_of_device
from catenary_scheduler.dispatch.chained.admission.admission import refusal
from catenary_scheduler.dispatch.chained.admission.preemption import ChainPreemption
from catenary_scheduler.dispatch.chained.chain_state import ChainState, set_capacities
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    LatencyRefitted,
    MoveCostsMeasured,
    PlanActivated,
    RequestCancelled,
    RequestCompleted,
    SessionFailed,
    SessionRequested,
    SessionsClosed,
    SessionsFound,
    SessionsHeld,
    SessionsProgressed,
)
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.errors import (
    CacheFull,
    ComputeFailed,
    NoActivePlan,
    PartitionLost,
    Unavailable,
)


class ChainLifecycle(ChainPreemption):
    """Handlers of events, one small method each."""

    # Requests

    def requested(self, event: SessionRequested) -> None:
        """Admits a request, or answers it at once."""
        known = self.sequences.get(event.request)
        if known is not None:
            self.resubmitted(known, event)
            return
        self.counters["arrived_requests"] += 1
        refused = refusal(self, event)
        if refused is not None:
            self.counters["rejected_requests"] += 1
            self.commands.append(refused)
            if event.in_flight is not None:
                self.refused(event.in_flight)
            return
        self.arrival_number += 1
        sequence = SequenceRequest(
            event, self.arrival_number, self.now if event.arrived_ns is None else event.arrived_ns
        )
        self.sequences[event.request] = sequence
        self.timers.set(sequence, sequence.deadline, len(self.sequences))
        if event.in_flight is None:
            if event.progress is not None:
                sequence.generated_tokens = event.progress.generated_tokens
            self.enqueue(sequence)
        else:
            self.adopt(sequence, event.in_flight)

    def completed(self, event: RequestCompleted) -> None:
        """Ends a request of which the gateway has every token."""
        sequence = self.sequences.get(event.request)
        if sequence is None:
            return
        self.counters["completed_requests"] += 1
        if event.progress is not None:
            asked, answer_tokens = sequence.event, event.progress.generated_tokens
            self.lengths_of(sequence.model).learn(
                asked.prompt_tokens, answer_tokens, asked.max_tokens
            )
            placer = self.model_queue(sequence.model).placer
            if placer is not None:
                placer.ended(sequence, event.progress)
        if sequence.session is not None:
            self.backoff.worked(sequence.session.hops)
            self._worked(sequence.session)
        self.forget(sequence)

    def cancelled(self, event: RequestCancelled) -> None:
        """Ends a request for which its client does not wait any more."""
        sequence = self.sequences.get(event.request)
        if sequence is not None:
            self.counters["cancelled_requests"] += 1
            self.forget(sequence)

    def unstarted(self, sequence: SequenceRequest) -> None:
        """Rejects a request whose deadline is over while it still waits."""
        model_queue = self.model_queue(sequence.model)
        retry_after = self.config.retry_after_ns
        if self.plan is None:
            self.reject(
                sequence, NoActivePlan.reason, "no plan is active", retry_after_ns=retry_after
            )
        elif not model_queue.usable:
            message = "no chain has all its agents now"
            self.reject(sequence, Unavailable.reason, message, retry_after_ns=retry_after)
        else:
            self.too_late(sequence, "queue")

    # Sessions

    def progressed(self, event: SessionsProgressed) -> None:
        """Takes in tokens of sessions; what these have saved may let another request start."""
        heard: dict[ModelKey, ModelQueue] = {}
        grown: dict[ChainState, ModelKey] = {}
        for progress in event.sessions:
            sequence = self.sequences.get(progress.request)
            if sequence is None or sequence.session is None:
                continue
            self.awaits_tokens(sequence)
            if progress.generated_tokens > 1:
                sequence.token_ns = progress.decode_ns // (progress.generated_tokens - 1)
            self._worked(sequence.session)
            model_queue = self.model_queue(sequence.model)
            if model_queue.placer is not None:
                model_queue.placer.progressed(sequence, progress)
                heard[sequence.model] = model_queue
            self.has_tokens(sequence, sequence.session, progress.generated_tokens)
            route = sequence.session.route
            if route is not None and route.cache_tokens:
                grown[route] = sequence.model
        for model, model_queue in heard.items():
            if model_queue.placer is not None:
                model_queue.placer.look(self.now)
            if model_queue.waiting:
                self.dirty[model] = None
        if grown:
            self.relieve_pressure(grown)

    def move_costs_measured(self, event: MoveCostsMeasured) -> None:
        """Takes in new costs of moves."""
        for source, target, bytes_per_second in event.links:
            self.migration_budget.measured(source, target, bytes_per_second)
        for model, cache_bytes in event.cache_bytes:
            self.migration_budget.model_has(model, cache_bytes)
        for model, runtime, cache_bytes in event.held_bytes:
            self.migration_budget.model_has(model, cache_bytes, runtime)

    def refitted(self, event: LatencyRefitted) -> None:
        """Takes in new latency lines of chains."""
        model_queue = self.model_queues.get(event.model)
        if model_queue is not None and model_queue.placer is not None:
            model_queue.placer.refit(event.lines)
            self.dirty[event.model] = None

    def sessions_closed(self, event: SessionsClosed) -> None:
        """Frees slots; if nobody asked, the session is over, and the gateway should say so soon."""
        for session_id in event.sessions:
            session = self.sessions.get(session_id)
            if (
                session is not None
                and session.sequence is not None
                and not session.left
                and session.ends_at(event.agent)
            ):
                session.left = True
                self.check_later(session.sequence, self.config.delivery_grace_ns)
            self.let_go(session_id, event.agent)
            if session is not None and session.arriving is not None:
                self.fail_move(session.arriving, "closed")

    def session_failed(self, event: SessionFailed) -> None:
        """Starts the request again elsewhere, or answers it with the failure."""
        session = self.sessions.get(event.session)
        if session is None or session.closing:
            return
        if session.arriving is not None:
            self.move_failed(session, event)
            return
        if event.reason == CacheFull.reason:
            self.cache_was_full(session, event.agent)
            return
        self.counters["failed_sessions"] += 1
        sequence = session.sequence
        if sequence is None:
            self.close(session)
        elif not event.retryable:
            self.reject(sequence, event.reason, event.message)
        elif is_of_device(event.reason) and self._is_to_blame(sequence, session, event):
            self.counters["failed_requests"] += 1
            self.breakers.forgive([each for _, each in sequence.failures], self.now)
            names = " and ".join(sorted({agent for agent, _ in sequence.failures}))
            self.reject(sequence, ComputeFailed.reason, f"it made {names} fail: {event.message}")
        else:
            self._suspect(session, event)
            self.restart(sequence)

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
                self.breakers.failed(agent, hop.partition, evidence, event.reason, self.now)
        sequence.failures += ((agent, session.session_id),)
        return len({agent for agent, _ in sequence.failures}) >= AGENTS_OF_A_VERDICT

    def _worked(self, session: Session) -> None:
        """Notes that the agents of a session compute."""
        if len(self.breakers):
            for hop in session.hops:
                self.breakers.worked(hop.agent, hop.partition, self.now)

    def _suspect(self, session: Session, event: SessionFailed) -> None:
        """Suspects the agent that is to blame, and the link over which it was not reached.

        If no agent is named, the gateway found no way into the chain, and its first agent is to
        blame. If the named agent is not on the chain, the reporting agent is to blame.
        """
        agents = {hop.agent for hop in session.hops}
        blamed, told_by = event.agent, event.told_by
        if blamed is None and session.hops:
            blamed = session.hops[0].agent
        if blamed not in agents and told_by in agents:
            blamed = told_by
        changed = blamed is not None and self.backoff.failed(blamed, self.now)
        if blamed is not None and told_by is not None and {blamed, told_by} <= agents:
            is_link = blamed != told_by and event.reason == PartitionLost.reason
            changed |= is_link and self.backoff.link_failed(told_by, blamed, self.now)
        if changed:
            self.refresh()

    # Cluster

    def agent_joined(self, event: AgentJoined) -> None:
        """Handles an agent that joined: chains through it may be used."""
        agent = event.agent.agent_id
        self.agents.add(agent)
        self.present.add(agent)
        if not self.availability.is_connected(agent):
            self.availability.connected(agent)
        self.migration_budget.agent_joined(event.agent)
        self.refresh()
        self.find_misplaced()

    def agent_lost(self, event: AgentLost) -> None:
        """Handles the loss of an agent: its sessions are started again elsewhere."""
        agent = event.agent
        self.agents.discard(agent)
        self.present.discard(agent)
        self.backoff.forget(agent)
        if self.availability.is_connected(agent):
            self.availability.disconnected(agent)
        self.lost(agent, self.slots.sessions_at(agent))
        self.refresh()

    def sessions_held(self, event: SessionsHeld) -> None:
        """Handles the list of all sessions that a connecting agent holds."""
        agent = event.agent
        self.present.add(agent)
        held = {each.session for each in event.sessions}
        gone = [each for each in self.slots.sessions_at(agent) if each not in held]
        self.lost(agent, gone)
        for each in event.sessions:
            self.found(agent, each)

    def sessions_found(self, event: SessionsFound) -> None:
        """Handles sessions that an agent holds and the book lacks, or has with too few slots."""
        for each in event.sessions:
            self.found(event.agent, each)

    def plan_activated(self, event: PlanActivated) -> None:
        """Takes a plan: sessions go on where they are, waiting requests use the new chains."""
        self.plan = event.plan
        self.hosted_by(event.plan)
        models = {model.model: model for model in event.plan.models}
        for model in models:
            self.model_queue(model)
        for key, model_queue in self.model_queues.items():
            model_queue.activate(models.get(key))
        set_capacities(event.plan, self.slots)
        self.refresh()
        self.find_misplaced()
        for key, model_queue in list(self.model_queues.items()):
            if not model_queue.served:
                for sequence in model_queue.waiting.sequences():
                    self.unserved(sequence)
            if model_queue.is_over:
                del self.model_queues[key]

    # Time

    def on_time(self) -> None:
        """Handles everything whose time has come."""
        for sequence in self.timers.due(self.now):
            self._is_due(sequence)
        if self.next_stall_look is not None and self.next_stall_look <= self.now:
            self._look_for_stalls()
        if self.unclaimed:
            self.end_claims()
        if self.moves:
            self.end_moves()
        if self.misplaced:
            self.look_at_misplaced()
        expiry = self.slots.next_expiry()
        if expiry is not None and expiry <= self.now:
            self._expire()
        for model, model_queue in self.model_queues.items():
            look = model_queue.waiting.wakeup()
            if look is not None and look <= self.now:
                self.dirty[model] = None

    def next_moment(self) -> Nanoseconds | None:
        """Returns when `on_time` has something to do."""
        moments = [
            self.timers.next(),
            self.slots.next_expiry(),
            self.availability.next_expiry(),
            self.next_claim_end(),
            self.next_move_end(),
            self.next_misplaced(),
            self.next_stall_look if self.sequences else None,
            *(model_queue.waiting.wakeup() for model_queue in self.model_queues.values()),
        ]
        return min((moment for moment in moments if moment is not None), default=None)

    # Inside

    def _look_for_stalls(self) -> None:
        """Starts sessions again that get no tokens, though all their agents seem well."""
        config = self.config
        running = [each for each in self.sequences.values() if each.session is not None]
        self.next_stall_look = self.now + max(1, config.stall_ns // 8) if running else None
        for sequence in running:
            session = sequence.session
            if session is None or session.left:  # its end is awaited, with another patience
                continue
            if self.now - sequence.heard > self._longest_silence(sequence, session):
                self.counters["stalled_sessions"] += 1
                self.restart(sequence)

    def _longest_silence(self, sequence: SequenceRequest, session: Session) -> Nanoseconds:
        config = self.config
        allowed = config.stall_ns
        if not session.runs:
            service_ns = session.route.service_ns if session.route is not None else 0
            allowed = max(4 * allowed, round(config.prompt_factor * service_ns))
        return max(allowed, round(config.stall_factor * sequence.token_ns))

    def _expire(self) -> None:
        """Repeats orders to close that were not obeyed in time; in the end writes the slots off."""
        for session_id in self.slots.overdue(self.now):
            session = self.sessions[session_id]
            sequence = (
                session.arriving.sequence if session.arriving is not None else session.sequence
            )
            if sequence is not None:
                last = sequence.deadline + self.config.deadline_grace_ns
                self.slots.confirm(session_id, last)
            elif not session.closing:
                self.counters["unclaimed_sessions"] += 1
                self.close(session)
            elif session.attempts < self.config.close_attempts:
                self.order_close(session)
        expired = self.slots.expire(self.now)
        for session_id in expired:
            self.counters["abandoned_sessions"] += 1
            self.is_over(session_id)
        if expired:
            self.refresh()

    def _is_due(self, sequence: SequenceRequest) -> None:
        last = sequence.deadline + self.config.deadline_grace_ns
        session = sequence.session
        if sequence.request in self.resting:
            self.tries_no_more(sequence)
        elif session is None and self.now < sequence.deadline:  # it rested, and waits for its turn
            self.timers.set(sequence, sequence.deadline, len(self.sequences))
        elif session is None:
            self.unstarted(sequence)
        elif self.now >= last:
            self.too_late(sequence, "in flight")
        elif sequence.check_later is not None and sequence.check_later <= self.now:
            sequence.check_later = None
            if session.left:
                self.counters["undelivered_sessions"] += 1
                self.restart(sequence)
            elif any(hop.agent not in self.agents for hop in session.hops):
                self.restart(sequence)
            else:
                self.timers.set(sequence, last, len(self.sequences))
        else:
            self.timers.set(sequence, min(last, sequence.check_later or last), len(self.sequences))
