"""From request to answer: what each event does to requests, sessions and slots."""

from __future__ import annotations

from catenary_scheduler.dispatch.breaker import AGENTS_OF_A_VERDICT, is_of_device
from catenary_scheduler.dispatch.chained.admission.admission import refusal
from catenary_scheduler.dispatch.chained.admission.overflow import ChainPreemption
from catenary_scheduler.dispatch.chained.queues.desk import ModelQueue
from catenary_scheduler.dispatch.chained.routes import ChainState, set_capacities
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
    """One small method per event."""

    # Requests

    def requested(self, event: SessionRequested) -> None:
        """Admits a request, or answers it at once."""
        known = self.tickets.get(event.request)
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
        self.sequence += 1
        ticket = SequenceRequest(
            event, self.sequence, self.now if event.arrived_ns is None else event.arrived_ns
        )
        self.tickets[event.request] = ticket
        self.timers.set(ticket, ticket.deadline, len(self.tickets))
        if event.in_flight is None:
            if event.progress is not None:
                ticket.generated_tokens = event.progress.generated_tokens
            self.enqueue(ticket)
        else:
            self.adopt(ticket, event.in_flight)

    def completed(self, event: RequestCompleted) -> None:
        """The gateway has every token."""
        ticket = self.tickets.get(event.request)
        if ticket is None:
            return
        self.counters["completed_requests"] += 1
        if event.progress is not None:
            asked, answer_tokens = ticket.event, event.progress.generated_tokens
            self.lengths_of(ticket.model).learn(
                asked.prompt_tokens, answer_tokens, asked.max_tokens
            )
            board = self.desk(ticket.model).board
            if board is not None:
                board.ended(ticket, event.progress)
        if ticket.session is not None:
            self.backoff.worked(ticket.session.hops)
            self._worked(ticket.session)
        self.forget(ticket)

    def cancelled(self, event: RequestCancelled) -> None:
        """Nobody waits for it any more."""
        ticket = self.tickets.get(event.request)
        if ticket is not None:
            self.counters["cancelled_requests"] += 1
            self.forget(ticket)

    def unstarted(self, ticket: SequenceRequest) -> None:
        """Its deadline is over and it still waits."""
        desk = self.desk(ticket.model)
        retry_after = self.config.retry_after_ns
        if self.plan is None:
            self.reject(
                ticket, NoActivePlan.reason, "no plan is active", retry_after_ns=retry_after
            )
        elif not desk.usable:
            message = "no chain has all its agents now"
            self.reject(ticket, Unavailable.reason, message, retry_after_ns=retry_after)
        else:
            self.too_late(ticket, "queue")

    # Sessions

    def progressed(self, event: SessionsProgressed) -> None:
        """Sessions got tokens: what they save may let somebody in."""
        heard: dict[ModelKey, ModelQueue] = {}
        grown: dict[ChainState, ModelKey] = {}
        for progress in event.sessions:
            ticket = self.tickets.get(progress.request)
            if ticket is None or ticket.session is None:
                continue
            self.awaits_tokens(ticket)
            if progress.generated_tokens > 1:
                ticket.token_ns = progress.decode_ns // (progress.generated_tokens - 1)
            self._worked(ticket.session)
            desk = self.desk(ticket.model)
            if desk.board is not None:
                desk.board.progressed(ticket, progress)
                heard[ticket.model] = desk
            self.has_tokens(ticket, ticket.session, progress.generated_tokens)
            route = ticket.session.route
            if route is not None and route.cache_tokens:
                grown[route] = ticket.model
        for model, desk in heard.items():
            if desk.board is not None:
                desk.board.look(self.now)
            if desk.line:
                self.dirty[model] = None
        if grown:
            self.relieve(grown)

    def boundaries_measured(self, event: MoveCostsMeasured) -> None:
        """Moves take more or less time than was thought."""
        for source, target, bytes_per_second in event.links:
            self.boundaries.measured(source, target, bytes_per_second)
        for model, cache_bytes in event.cache_bytes:
            self.boundaries.model_has(model, cache_bytes)
        for model, runtime, cache_bytes in event.held_bytes:
            self.boundaries.model_has(model, cache_bytes, runtime)

    def refitted(self, event: LatencyRefitted) -> None:
        """Chains are faster or slower than was thought."""
        desk = self.desks.get(event.model)
        if desk is not None and desk.board is not None:
            desk.board.refit(event.lines)
            self.dirty[event.model] = None

    def sessions_closed(self, event: SessionsClosed) -> None:
        """Gives slots free; unasked, it is a session's end, and the gateway should say so soon."""
        for session_id in event.sessions:
            session = self.sessions.get(session_id)
            if (
                session is not None
                and session.ticket is not None
                and not session.left
                and session.ends_at(event.agent)
            ):
                session.left = True
                self.doubt(session.ticket, self.config.delivery_grace_ns)
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
        ticket = session.ticket
        if ticket is None:
            self.close(session)
        elif not event.retryable:
            self.reject(ticket, event.reason, event.message)
        elif is_of_device(event.reason) and self._is_to_blame(ticket, session, event):
            self.counters["failed_requests"] += 1
            self.breakers.forgive([each for _, each in ticket.failures], self.now)
            names = " and ".join(sorted({agent for agent, _ in ticket.failures}))
            self.reject(ticket, ComputeFailed.reason, f"it made {names} fail: {event.message}")
        else:
            self._suspect(session, event)
            self.restart(ticket)

    def _is_to_blame(self, ticket: SequenceRequest, session: Session, event: SessionFailed) -> bool:
        """A device could not compute a session; True if the session is what others failed on."""
        agent = event.agent
        if agent is None:
            return False
        for hop in session.hops:
            if hop.agent == agent:
                evidence = session.session_id
                self.breakers.failed(agent, hop.partition, evidence, event.reason, self.now)
        ticket.failures += ((agent, session.session_id),)
        return len({agent for agent, _ in ticket.failures}) >= AGENTS_OF_A_VERDICT

    def _worked(self, session: Session) -> None:
        """The agents of a session compute."""
        if len(self.breakers):
            for hop in session.hops:
                self.breakers.worked(hop.agent, hop.partition, self.now)

    def _suspect(self, session: Session, event: SessionFailed) -> None:
        """Suspects the agent that is to blame, and the link it could not be reached over.

        Nobody named: the gateway found no way in. No agent named: the agent found none out.
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
        """Chains through it may be used."""
        agent = event.agent.agent_id
        self.agents.add(agent)
        self.present.add(agent)
        if not self.availability.is_connected(agent):
            self.availability.connected(agent)
        self.boundaries.agent_joined(event.agent)
        self.refresh()
        self.find_strays()

    def agent_lost(self, event: AgentLost) -> None:
        """What it held is gone; the sessions go on elsewhere."""
        agent = event.agent
        self.agents.discard(agent)
        self.present.discard(agent)
        self.backoff.forget(agent)
        if self.availability.is_connected(agent):
            self.availability.disconnected(agent)
        self.lost(agent, self.slots.sessions_at(agent))
        self.refresh()

    def sessions_held(self, event: SessionsHeld) -> None:
        """An agent said hello: it holds these sessions and no others."""
        agent = event.agent
        self.present.add(agent)
        held = {each.session for each in event.sessions}
        gone = [each for each in self.slots.sessions_at(agent) if each not in held]
        self.lost(agent, gone)
        for each in event.sessions:
            self.found(agent, each)

    def sessions_found(self, event: SessionsFound) -> None:
        """An agent holds sessions the book knows nothing of, or not as much as there is."""
        for each in event.sessions:
            self.found(event.agent, each)

    def plan_activated(self, event: PlanActivated) -> None:
        """Sessions go on where they are; who waits is served by the new chains."""
        self.plan = event.plan
        self.hosted_by(event.plan)
        models = {model.model: model for model in event.plan.models}
        for model in models:
            self.desk(model)
        for key, desk in self.desks.items():
            desk.activate(models.get(key))
        set_capacities(event.plan, self.slots)
        self.refresh()
        self.find_strays()
        for key, desk in list(self.desks.items()):
            if not desk.served:
                for ticket in desk.line.tickets():
                    self.unserved(ticket)
            if desk.is_over:
                del self.desks[key]

    # Time

    def on_time(self) -> None:
        """Looks after everything whose time has come."""
        for ticket in self.timers.due(self.now):
            self._is_due(ticket)
        if self.next_stall_look is not None and self.next_stall_look <= self.now:
            self._look_for_stalls()
        if self.unclaimed:
            self.end_claims()
        if self.moves:
            self.end_moves()
        if self.strays:
            self.look_at_strays()
        expiry = self.slots.next_expiry()
        if expiry is not None and expiry <= self.now:
            self._expire()
        for model, desk in self.desks.items():
            look = desk.line.wakeup()
            if look is not None and look <= self.now:
                self.dirty[model] = None

    def next_moment(self) -> Nanoseconds | None:
        """When `on_time` has something to do."""
        moments = [
            self.timers.next(),
            self.slots.next_expiry(),
            self.availability.next_expiry(),
            self.next_claim_end(),
            self.next_move_end(),
            self.next_stray(),
            self.next_stall_look if self.tickets else None,
            *(desk.line.wakeup() for desk in self.desks.values()),
        ]
        return min((moment for moment in moments if moment is not None), default=None)

    # Inside

    def _look_for_stalls(self) -> None:
        """Starts sessions again that get no tokens, though all their agents seem well."""
        config = self.config
        running = [each for each in self.tickets.values() if each.session is not None]
        self.next_stall_look = self.now + max(1, config.stall_ns // 8) if running else None
        for ticket in running:
            session = ticket.session
            if session is None or session.left:  # its end is awaited, with another patience
                continue
            if self.now - ticket.heard > self._longest_silence(ticket, session):
                self.counters["stalled_sessions"] += 1
                self.restart(ticket)

    def _longest_silence(self, ticket: SequenceRequest, session: Session) -> Nanoseconds:
        config = self.config
        allowed = config.stall_ns
        if not session.runs:
            service_ns = session.route.service_ns if session.route is not None else 0
            allowed = max(4 * allowed, round(config.prompt_factor * service_ns))
        return max(allowed, round(config.stall_factor * ticket.token_ns))

    def _expire(self) -> None:
        """Insists on what was not closed in time; writes off what was never closed."""
        for session_id in self.slots.overdue(self.now):
            session = self.sessions[session_id]
            ticket = session.arriving.ticket if session.arriving is not None else session.ticket
            if ticket is not None:
                last = ticket.deadline + self.config.deadline_grace_ns
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

    def _is_due(self, ticket: SequenceRequest) -> None:
        last = ticket.deadline + self.config.deadline_grace_ns
        session = ticket.session
        if ticket.request in self.resting:
            self.tries_no_more(ticket)
        elif session is None and self.now < ticket.deadline:  # it rested, and waits for its turn
            self.timers.set(ticket, ticket.deadline, len(self.tickets))
        elif session is None:
            self.unstarted(ticket)
        elif self.now >= last:
            self.too_late(ticket, "in flight")
        elif ticket.doubt is not None and ticket.doubt <= self.now:
            ticket.doubt = None
            if session.left:
                self.counters["undelivered_sessions"] += 1
                self.restart(ticket)
            elif any(hop.agent not in self.agents for hop in session.hops):
                self.restart(ticket)
            else:
                self.timers.set(ticket, last, len(self.tickets))
        else:
            self.timers.set(ticket, min(last, ticket.doubt or last), len(self.tickets))
