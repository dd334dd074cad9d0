"""What the chained dispatcher knows, and the few things that may be done to it.

Every rule here serves two promises: a request that was admitted is answered exactly once, and a
session never finds an agent full, because slots are given again only when their agent has let go.
"""

from __future__ import annotations

from scheduler.book.caches import Cache
from scheduler.book.slots import SlotLedger
from scheduler.dispatch.chained.board_figures import PLACEMENT_COUNTERS
from scheduler.dispatch.chained.config import ChainedConfig
from scheduler.dispatch.chained.desk import Desk
from scheduler.dispatch.chained.distrust import Distrust
from scheduler.dispatch.chained.policy import PolicyFactory
from scheduler.dispatch.chained.routes import Route
from scheduler.dispatch.chained.tracking import Session, Ticket, Timers
from scheduler.dispatch.events import CloseSessions, Command, Reject, StartSession
from scheduler.dispatch.placing.lengths import LengthPredictor
from scheduler.dispatch.placing.rebalancer import Rebalancer
from services.domain.ids import AgentId, ModelKey, Nanoseconds, RequestId, SessionId
from services.domain.plan import ChainHop, Plan
from services.errors import DeadlineExceeded, NoActivePlan, PartitionLost

_COUNTERS = (
    "arrived_requests", "completed_requests", "cancelled_requests", "rejected_requests",
    "decisions", "started_sessions", "restarted_sessions", "failed_sessions",
    "undelivered_sessions", "adopted_sessions", "unclaimed_sessions", "abandoned_sessions",
    *PLACEMENT_COUNTERS,
    "rebalanced_sessions",
)  # fmt: skip


class ChainLedger:
    """State of the chained dispatcher.

    `commands` collects what the shell is to do; `dirty` the models where somebody may start; `now`
    is the moment of the event that is being handled.
    """

    def __init__(
        self, config: ChainedConfig, slots: SlotLedger, policy: PolicyFactory, first_session: int
    ) -> None:
        self.now: Nanoseconds = 0
        self.commands: list[Command] = []
        self.dirty: dict[ModelKey, None] = {}
        self.desks: dict[ModelKey, Desk] = {}
        self.lengths: dict[ModelKey, LengthPredictor] = {}
        """Outlive the desks: what is known of a model may be known before a plan serves it."""
        self.tickets: dict[RequestId, Ticket] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.timers = Timers()
        self.distrust = Distrust(config)
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.config = config
        self.slots = slots
        self.plan: Plan | None = None
        self.agents: set[AgentId] = set()
        """Those that may be used."""
        self.present: set[AgentId] = set()
        """Those that were heard of: they answer orders, and told which sessions they hold."""
        self.first_session = first_session
        self.next_session = first_session
        self.unclaimed: dict[SessionId, Nanoseconds | None] = {}
        """Sessions found, and until when they may be claimed; None: found since the last event."""
        self.sequence = 0
        self._policy = policy
        self._orders: dict[AgentId, list[SessionId]] = {}

    # Requests

    def desk(self, model: ModelKey) -> Desk:
        """Returns the desk of a model, made on first use."""
        desk = self.desks.get(model)
        if desk is None:
            desk = self.desks[model] = Desk(model, self._policy(), self.slots)
            if desk.board is not None:
                desk.board.lengths = self.lengths_of(model)
                if self.config.rebalance:
                    desk.board.rebalancer = Rebalancer()
                desk.board.counters = self.counters
        return desk

    def lengths_of(self, model: ModelKey) -> LengthPredictor:
        """Returns what is known of the lengths of a model's answers, made on first use."""
        known = self.lengths.get(model)
        if known is None:
            known = self.lengths[model] = LengthPredictor()
        return known

    def enqueue(self, ticket: Ticket) -> None:
        """Has a request wait for a chain."""
        self.desk(ticket.model).line.push(ticket)
        self.dirty[ticket.model] = None

    def reject(
        self,
        ticket: Ticket,
        reason: str,
        message: str,
        *,
        retry_after_ns: Nanoseconds | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        """Answers a request with an error, unless it was answered already."""
        if self.tickets.get(ticket.request) is ticket:
            self.counters["rejected_requests"] += 1
            self.commands.append(
                Reject(ticket.request, reason, message, retry_after_ns, None, details or {})
            )
            self.forget(ticket)

    def too_late(self, ticket: Ticket, stage: str) -> None:
        """Answers a request whose deadline is over."""
        message = "no answer before the deadline"
        self.reject(ticket, DeadlineExceeded.reason, message, details={"stage": stage})

    def unserved(self, ticket: Ticket) -> None:
        """Answers a request whose model no plan serves any more."""
        self.reject(
            ticket,
            NoActivePlan.reason,
            f"no plan serves {ticket.model} any more",
            retry_after_ns=self.config.retry_after_ns,
        )

    def forget(self, ticket: Ticket) -> None:
        """Stops following a request, and closes its session."""
        self.tickets.pop(ticket.request, None)
        ticket.timer = -1
        session = ticket.session
        if session is not None:
            self.close(session)
        else:
            self.desk(ticket.model).line.remove(ticket)

    def again(self, ticket: Ticket) -> None:
        """Puts a request back to the head of its queue; what it had is closed."""
        if ticket.session is not None:
            self.close(ticket.session)
        ticket.again = True
        ticket.doubt = None
        if self.plan is not None and not self.desk(ticket.model).served:
            self.unserved(ticket)
        elif self.now >= ticket.deadline:
            self.too_late(ticket, "queue")
        else:
            self.timers.set(ticket, ticket.deadline, len(self.tickets))
            self.enqueue(ticket)

    def restart(self, ticket: Ticket) -> None:
        """Starts a request again that lost its session, as often as is allowed."""
        ticket.restarts += 1
        if ticket.restarts > self.config.max_restarts:
            lost = f"the session was lost {ticket.restarts} times"
            self.reject(ticket, PartitionLost.reason, lost)
            return
        self.counters["restarted_sessions"] += 1
        self.again(ticket)

    # Sessions

    def start(self, ticket: Ticket, route: Route) -> None:
        """Books slots on every hop and has the gateway open a session."""
        session_id = SessionId(self.next_session)
        self.next_session += 1
        expires = ticket.deadline + self.config.deadline_grace_ns
        self.slots.reserve(session_id, route.claims, self.now, expires)
        session = Session(session_id, ticket, route)
        ticket.session = session
        self.sessions[session_id] = session
        self.counters["started_sessions"] += 1
        hops = route.hops
        decode_hops: tuple[ChainHop, ...] = ()
        if route.halves is None:
            route.running += 1
        else:
            prefill, decode = route.halves
            prefill.running += 1
            decode.running += 1
            hops, decode_hops = prefill.hops, decode.hops
        first_ns = per_token_ns = 0
        objectives = ticket.event.objectives
        board = self.desk(ticket.model).board
        if board is not None:
            objectives = board.objectives_of(ticket.event)
            first_ns, per_token_ns = board.expected(ticket, route, self.now)
            board.seat(ticket, route, self.now)
        self.commands.append(
            StartSession(
                session_id, ticket.request, route.chain_id, hops, decode_hops, objectives,
                first_ns, per_token_ns,
            )
        )  # fmt: skip

    def unstart(self, ticket: Ticket) -> None:
        """Takes back a start the gateway has not been told of: nothing of it is left."""
        session = ticket.session
        if session is None:
            return
        self._leaves(ticket)
        self.slots.release(session.session_id)
        for route in (session.prefill, session.route):
            if route is not None:
                route.running -= 1
        del self.sessions[session.session_id]
        ticket.session = session.ticket = None
        self.counters["started_sessions"] -= 1
        self.commands = [
            command
            for command in self.commands
            if not (isinstance(command, StartSession) and command.session == session.session_id)
        ]

    def close(self, session: Session) -> None:
        """Has every agent that holds slots of a session free them; they stay booked until then."""
        ticket = session.ticket
        if ticket is not None:
            self._leaves(ticket)
            ticket.session = session.ticket = None
        self.unclaimed.pop(session.session_id, None)
        session.closing = True
        for agent in self.slots.agents(session.session_id):
            if agent not in self.present:  # should it come, it tells what it holds
                self.were_freed(self.slots.release(session.session_id, agent))
        if session.session_id in self.slots:
            self.order_close(session)
        else:
            self.is_over(session.session_id)

    def _leaves(self, ticket: Ticket) -> None:
        """The session of a request does not load its worker any more."""
        desk = self.desks.get(ticket.model)
        if desk is not None and desk.board is not None:
            desk.board.leave(ticket.request)

    def order_close(self, session: Session) -> None:
        """Tells the agents of a session (again) to close it."""
        session.attempts += 1
        for agent in self.slots.agents(session.session_id):
            self.tell_to_close(agent, session.session_id)
        self.slots.expire_at(session.session_id, self.now + self.config.close_patience_ns)

    def tell_to_close(self, agent: AgentId, session: SessionId) -> None:
        """Has the orders of this event tell an agent to close a session."""
        self._orders.setdefault(agent, []).append(session)

    def let_go(self, session: SessionId, agent: AgentId) -> None:
        """An agent holds nothing of a session any more."""
        self.were_freed(self.slots.release(session, agent))
        if session not in self.slots:
            self.is_over(session)
            return
        known = self.sessions.get(session)
        if known is not None and known.prefill is not None:
            holders = self.slots.agents(session)
            if not any(each in holders for each in known.prefill_agents):
                self._handed_over(known)

    def _handed_over(self, session: Session) -> None:
        """The agents that ran its prompt have let it go: its place on their chain is free."""
        prefill, session.prefill = session.prefill, None
        if prefill is None:
            return
        prefill.running -= 1
        if session.route is not None:
            session.hops = session.route.hops
        model = prefill.hops[0].partition.model
        desk = self.desks.get(model)
        if desk is not None:
            desk.line.offer(prefill)
            self.dirty[model] = None

    def were_freed(self, caches: list[Cache]) -> None:
        """Somebody may start now where slots were freed."""
        for cache in caches:
            model = cache.partition.model
            desk = self.desks.get(model)
            if desk is not None:
                desk.line.freed(cache)
                self.dirty[model] = None

    def is_over(self, session_id: SessionId) -> None:
        """No agent holds anything of a session: its place on the chain is free.

        If a request is still open for it, that waits for the gateway's word, and may yet be started
        again.
        """
        session = self.sessions.get(session_id)
        if session is None:
            return
        if session.ticket is not None:
            self._leaves(session.ticket)
        else:
            del self.sessions[session_id]
            self.unclaimed.pop(session_id, None)
        self._handed_over(session)
        route, session.route = session.route, None
        if route is not None:
            route.running -= 1
            model = route.hops[0].partition.model
            desk = self.desks.get(model)
            if desk is not None:
                desk.session_ended(self.now)
                desk.line.offer(route)
                self.dirty[model] = None

    def take_commands(self) -> list[Command]:
        """Returns the commands of this event: what agents must free first."""
        commands, self.commands = self.commands, []
        if self._orders:
            orders, self._orders = self._orders, {}
            closes: list[Command] = [
                CloseSessions(agent, tuple(dict.fromkeys(sessions)))
                for agent, sessions in orders.items()
            ]
            return closes + commands
        return commands
