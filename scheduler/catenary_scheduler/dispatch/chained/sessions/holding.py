"""What the chained dispatcher knows, and sessions with the slots they hold: how they begin and end.

The promise kept here: a session never finds an agent full, because slots are given again only when
their agent has let go.
"""

from __future__ import annotations

from typing import Literal, get_args

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.breaker import Breakers
from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.placement.board_figures import PLACEMENT_COUNTERS
from catenary_scheduler.dispatch.chained.queues.desk import Desk
from catenary_scheduler.dispatch.chained.queues.failure_backoff import FailureBackoff
from catenary_scheduler.dispatch.chained.queues.lines import PolicyFactory
from catenary_scheduler.dispatch.chained.routes import Route
from catenary_scheduler.dispatch.chained.sessions.token_room import TokenRoom
from catenary_scheduler.dispatch.chained.tracking import Move, Session, Ticket, Timers
from catenary_scheduler.dispatch.events import CloseSessions, Command, StartSession
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Rebalancer
from catenary_scheduler.packing.transfers.boundaries import Boundaries
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, RequestId, SessionId
from catenary_services.domain.plan import ChainHop, Plan

MoveFailure = Literal["deadline", "agent", "lost", "closed", "over"]
"""Not done in time; an agent said that it cannot; an agent is gone; an agent said unasked that it
is over; the request has ended or lost its session meanwhile."""
MOVE_COUNTERS = (
    "wanted_moves",
    "refused_moves",
    "started_moves",
    "kv_moves",
    "tokens_moves",
    "failed_moves",
    *(f"failed_moves_{each}" for each in get_args(MoveFailure)),
)
"""Asked for by `MoveWanted`; of them and of others, not begun; begun; done, by what travelled; not
done, in all and by why."""
_FAILURES = 256
"""So many are remembered."""
_COUNTERS = (
    "arrived_requests",
    "completed_requests",
    "cancelled_requests",
    "rejected_requests",
    "decisions",
    "started_sessions",
    "restarted_sessions",
    "failed_sessions",
    "failed_requests",
    "stalled_sessions",
    "undelivered_sessions",
    "adopted_sessions",
    "unclaimed_sessions",
    "abandoned_sessions",
    *PLACEMENT_COUNTERS,
    "rebalanced_sessions",
    "preempted_sessions",
    "overflow_moves",
    *MOVE_COUNTERS,
)


class SessionHolding:
    """State of the chained dispatcher.

    `commands` collects what the shell is to do; `dirty` the models where somebody may start; `now`
    is the moment of the event that is being handled.
    """

    def __init__(
        self,
        config: ChainedConfig,
        slots: SlotLedger,
        availability: Availability,
        policy: PolicyFactory,
        first_session: int,
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
        self.availability = availability
        self.availability_seen = -1
        """Of this version are the chains that are offered."""
        self.backoff = FailureBackoff(config, availability)
        self.breakers = Breakers(availability, config.breaker)
        self.next_stall_look: Nanoseconds | None = None
        """When to look for sessions that get no tokens; None: nobody has a session."""
        self.resting: dict[RequestId, Ticket] = {}
        """Failed where nobody is not suspected; they wait for the end of that, outside of lines."""
        self.boundaries = Boundaries(config.boundaries)
        """How much may move."""
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.config = config
        self.slots = slots
        self.room = TokenRoom()
        """How large sessions are; `slots` says how many there are."""
        self.plan: Plan | None = None
        self.agents: set[AgentId] = set()
        """Those that joined: they said which sessions they hold, and were not lost since."""
        self.present: set[AgentId] = set()
        """Those that were heard of: they answer orders, and told which sessions they hold."""
        self.first_session = first_session
        self.next_session = first_session
        self.unclaimed: dict[SessionId, Nanoseconds | None] = {}
        """Sessions found, and until when they may be claimed; None: found since the last event."""
        self.moves: dict[SessionId, Move] = {}
        """Those under way, by what the session becomes."""
        self.moves_at: dict[AgentId, int] = {}
        """How many of them concern an agent."""
        self.failures: dict[SessionId, MoveFailure] = {}
        """Why the last moves failed, by what the sessions would have become."""
        self.draining: frozenset[AgentId] = frozenset()
        """Agents that are to go: nothing begins there, if it can begin elsewhere."""
        self.strays: dict[SessionId, None] = {}
        """Sessions that are where nothing should be any more."""
        self.sequence = 0
        self._policy = policy
        self._orders: dict[AgentId, list[SessionId]] = {}

    def desk(self, model: ModelKey) -> Desk:
        """Returns the desk of a model, made on first use."""
        desk = self.desks.get(model)
        if desk is None:
            desk = self.desks[model] = Desk(model, self._policy(self.slots), self.slots)
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

    # Sessions

    def start(self, ticket: Ticket, route: Route) -> None:
        """Books slots on every hop and has the gateway open a session."""
        session = self._booked(ticket, route)
        session.ticket, ticket.session = ticket, session
        session.carried_tokens = ticket.generated_tokens
        self.counters["started_sessions"] += 1
        self.awaits_tokens(ticket)
        if len(self.breakers):
            for hop in route.hops:
                self.breakers.given(hop.agent, hop.partition, self.now)
        hops = route.hops
        decode_hops: tuple[ChainHop, ...] = ()
        if route.halves is not None:
            hops, decode_hops = route.halves[0].hops, route.halves[1].hops
        first_ns = per_token_ns = 0
        objectives = ticket.event.objectives
        board = self.desk(ticket.model).board
        if board is not None:
            objectives = board.objectives_of(ticket.event)
            first_ns, per_token_ns = board.expected(ticket, route, self.now)
            board.seat(ticket, route, self.now)
        self.commands.append(
            StartSession(
                session.session_id,
                ticket.request,
                route.chain_id,
                hops,
                decode_hops,
                objectives,
                first_ns,
                per_token_ns,
            )
        )

    def awaits_tokens(self, ticket: Ticket) -> None:
        """The session of a request has just got a token, or is about to get its first."""
        ticket.heard = self.now
        if self.next_stall_look is None:
            self.next_stall_look = self.now + self.config.stall_ns

    def _booked(self, ticket: Ticket, route: Route) -> Session:
        """Returns a new session that holds slots on every hop of a route."""
        session_id = SessionId(self.next_session)
        self.next_session += 1
        expires = ticket.deadline + self.config.deadline_grace_ns
        self.slots.reserve(session_id, route.claims, self.now, expires)
        session = self.sessions[session_id] = Session(session_id, None, route)
        for each in (session.prefill, session.route):
            if each is not None:
                each.running += 1
        routes = [each for each in (session.prefill, session.route) if each is not None]
        self.room.begins(session_id, routes, ticket.tokens)
        return session

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
        self.room.ends(session.session_id)
        del self.sessions[session.session_id]
        self.strays.pop(session.session_id, None)
        ticket.session = session.ticket = None
        self.counters["started_sessions"] -= 1
        self.commands = [
            command
            for command in self.commands
            if not (isinstance(command, StartSession) and command.session == session.session_id)
        ]

    def close(self, session: Session) -> None:
        """Has every agent that holds slots of a session free them; they stay booked until then.

        What it is to become elsewhere is closed, too.
        """
        if session.moving is not None:
            self.fail_move(session.moving, "over")
        ticket = session.ticket
        if ticket is not None:
            self._leaves(ticket)
            ticket.session = session.ticket = None
        self.unclaimed.pop(session.session_id, None)
        self.strays.pop(session.session_id, None)
        session.closing = True
        self.room.leaves(session.session_id)
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
        self.room.left(session.session_id, prefill)
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
        if session.arriving is not None:
            self.fail_move(session.arriving, "closed")
            return
        if session.ticket is not None:
            self._leaves(session.ticket)
        else:
            del self.sessions[session_id]
            self.unclaimed.pop(session_id, None)
        self._handed_over(session)
        self.room.ends(session_id)
        route, session.route = session.route, None
        if route is not None:
            route.running -= 1
            model = route.hops[0].partition.model
            desk = self.desks.get(model)
            if desk is not None:
                desk.session_ended(self.now)
                desk.line.offer(route)
                self.dirty[model] = None

    def refresh(self) -> None:
        """Says anew which chains may be used."""
        self.availability_seen = self.availability.version
        for model, desk in self.desks.items():
            desk.refresh(self.availability)
            self.dirty[model] = None
        for request, ticket in list(self.resting.items()):
            if not self.desk(ticket.model).must_rest:
                del self.resting[request]
                self.desk(ticket.model).line.push(ticket)
        draining = self.availability.impaired_by(Impairment.DRAINING)
        if draining != self.draining:
            self.draining = draining
            self.find_strays()

    def find_strays(self) -> None:
        """Agents or plan are not what they were."""

    # Moves

    def fail_move(self, move: Move, why: MoveFailure) -> None:
        """Gives a move up: the session stays what it was, if that goes on."""
        source, target = move.source, move.target
        self.counters["failed_moves"] += 1
        self.counters[f"failed_moves_{why}"] += 1
        self.failures[target.session_id] = why
        if len(self.failures) > _FAILURES:
            del self.failures[next(iter(self.failures))]
        self.unlink(move)
        board = self.desk(move.ticket.model).board
        if board is not None:
            board.unreserve(move.ticket.request)
        if why != "over":
            pause = self.config.move_pause_ns << min(source.failed_moves, 16)
            source.move_after = self.now + min(self.config.longest_move_pause_ns, pause)
            source.failed_moves += 1
            if source.hops and source.hops[0].agent in self.present:
                # It leads the move; agents that know nothing of a session say that it is closed.
                self.tell_to_close(source.hops[0].agent, target.session_id)
            source.closed_move = target.session_id if why == "closed" else None
        self.close(target)

    def unlink(self, move: Move) -> None:
        """A move is over, however it ended: agents it concerned have room for others."""
        del self.moves[move.target.session_id]
        for agent in move.agents:
            self.moves_at[agent] -= 1
            if not self.moves_at[agent]:
                del self.moves_at[agent]
        move.source.moving = move.target.arriving = None
        self.dirty[move.ticket.model] = None

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
