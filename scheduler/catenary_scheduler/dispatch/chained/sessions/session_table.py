"""State of the sessions of the chained dispatcher: how they get slots, begin and end.

The promise kept here: a session never finds an agent full, because slots are given again only when
their agent has released them.
"""

from __future__ import annotations

from typing import Literal, get_args

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.breaker import CircuitBreakers
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.placement.placer_figures import PLACEMENT_COUNTERS
from catenary_scheduler.dispatch.chained.queues.failure_backoff import FailureBackoff
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.queues.wait_queue import PolicyFactory
from catenary_scheduler.dispatch.chained.sessions.kv_budget import KvBudget
from catenary_scheduler.dispatch.chained.tracking import (
    Move,
    RequestTimers,
    SequenceRequest,
    Session,
)
from catenary_scheduler.dispatch.events import CloseSessions, Command, StartSession
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Rebalancer
from catenary_scheduler.packing.transfers.migration_budget import MigrationBudget
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, RequestId, SessionId
from catenary_services.domain.plan import ChainHop, Plan

MoveFailure = Literal["deadline", "agent", "lost", "closed", "over"]
"""Reasons of failed moves. In order: not done in time; an agent said that it cannot; an agent is
gone; an agent said unasked that it is over; the request has ended or lost its session meanwhile."""
MOVE_COUNTERS = (
    "wanted_moves",
    "refused_moves",
    "started_moves",
    "kv_moves",
    "tokens_moves",
    "failed_moves",
    *(f"failed_moves_{each}" for each in get_args(MoveFailure)),
)
"""Counters of moves. In order: asked for by `MoveRequested`; not begun, whether asked for or not;
begun; done, by what travelled; failed, in all and by reason."""
_FAILURES = 256
"""Number of failed moves that are remembered."""
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


class SessionTable:
    """State of the chained dispatcher.

    `commands` collects the commands of the event in hand; `dirty` the models of which a request may
    start; `now` is the moment of that event.
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
        self.model_queues: dict[ModelKey, ModelQueue] = {}
        self.lengths: dict[ModelKey, LengthPredictor] = {}
        """Predictors of answer lengths. They outlive the model queues, and may exist before a plan
        does."""
        self.sequences: dict[RequestId, SequenceRequest] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.timers = RequestTimers()
        self.availability = availability
        self.availability_seen = -1
        """Version of the availability from which the offered chains were made."""
        self.backoff = FailureBackoff(config, availability)
        self.breakers = CircuitBreakers(availability, config.breaker)
        self.next_stall_look: Nanoseconds | None = None
        """Moment of the next search for sessions that get no tokens; None if no request has a
        session."""
        self.resting: dict[RequestId, SequenceRequest] = {}
        """Requests that failed where every chain is suspected; they wait outside the queues for its
        end."""
        self.migration_budget = MigrationBudget(config.migration_budget)
        """Limits on how much may move."""
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.config = config
        self.slots = slots
        self.kv_budget = KvBudget()
        """Sizes of the sessions in tokens; `slots` counts the sessions."""
        self.plan: Plan | None = None
        self.agents: set[AgentId] = set()
        """Agents that joined: they said which sessions they hold, and were not lost since."""
        self.present: set[AgentId] = set()
        """Agents that were heard of: they answer orders, and told which sessions they hold."""
        self.first_session = first_session
        self.next_session = first_session
        self.unclaimed: dict[SessionId, Nanoseconds | None] = {}
        """Sessions that were found, and the end of the time for a claim; None: found since the last
        event."""
        self.moves: dict[SessionId, Move] = {}
        """Moves in progress, by the session that the moving one becomes."""
        self.moves_at: dict[AgentId, int] = {}
        """Number of moves in progress that concern an agent."""
        self.failures: dict[SessionId, MoveFailure] = {}
        """Reasons of the latest failed moves, by the session that the moving one would have
        become."""
        self.draining: frozenset[AgentId] = frozenset()
        """Agents that are draining: nothing begins there if it can begin elsewhere."""
        self.misplaced: dict[SessionId, None] = {}
        """Sessions on agents or partitions that should not be used any more."""
        self.arrival_number = 0
        self._policy = policy
        self._orders: dict[AgentId, list[SessionId]] = {}

    def model_queue(self, model: ModelKey) -> ModelQueue:
        """Returns the queue of a model, made on first use."""
        model_queue = self.model_queues.get(model)
        if model_queue is None:
            model_queue = self.model_queues[model] = ModelQueue(
                model, self._policy(self.slots), self.slots
            )
            if model_queue.placer is not None:
                model_queue.placer.lengths = self.lengths_of(model)
                if self.config.rebalance:
                    model_queue.placer.rebalancer = Rebalancer()
                model_queue.placer.counters = self.counters
        return model_queue

    def lengths_of(self, model: ModelKey) -> LengthPredictor:
        """Returns the predictor of a model's answer lengths, made on first use."""
        known = self.lengths.get(model)
        if known is None:
            known = self.lengths[model] = LengthPredictor()
        return known

    # Sessions

    def start(self, sequence: SequenceRequest, route: ChainState) -> None:
        """Books slots on every hop and orders the gateway to open a session."""
        session = self._booked(sequence, route)
        session.sequence, sequence.session = sequence, session
        session.carried_tokens = sequence.generated_tokens
        self.counters["started_sessions"] += 1
        self.awaits_tokens(sequence)
        if len(self.breakers):
            for hop in route.hops:
                self.breakers.given(hop.agent, hop.partition, self.now)
        hops = route.hops
        decode_hops: tuple[ChainHop, ...] = ()
        if route.halves is not None:
            hops, decode_hops = route.halves[0].hops, route.halves[1].hops
        first_ns = per_token_ns = 0
        objectives = sequence.event.objectives
        placer = self.model_queue(sequence.model).placer
        if placer is not None:
            objectives = placer.objectives_of(sequence.event)
            first_ns, per_token_ns = placer.expected(sequence, route, self.now)
            placer.start(sequence, route, self.now)
        self.commands.append(
            StartSession(
                session.session_id,
                sequence.request,
                route.chain_id,
                hops,
                decode_hops,
                objectives,
                first_ns,
                per_token_ns,
            )
        )

    def awaits_tokens(self, sequence: SequenceRequest) -> None:
        """Restarts the stall timer of a request whose session got or is about to get a token."""
        sequence.heard = self.now
        if self.next_stall_look is None:
            self.next_stall_look = self.now + self.config.stall_ns

    def _booked(self, sequence: SequenceRequest, route: ChainState) -> Session:
        """Returns a new session that holds slots on every hop of a route."""
        session_id = SessionId(self.next_session)
        self.next_session += 1
        expires = sequence.deadline + self.config.deadline_grace_ns
        self.slots.reserve(session_id, route.claims, self.now, expires)
        session = self.sessions[session_id] = Session(session_id, None, route)
        for each in (session.prefill, session.route):
            if each is not None:
                each.running += 1
        routes = [each for each in (session.prefill, session.route) if each is not None]
        self.kv_budget.begins(session_id, routes, sequence.tokens)
        return session

    def unstart(self, sequence: SequenceRequest) -> None:
        """Takes back a start of which the gateway has not been told; nothing of it remains."""
        session = sequence.session
        if session is None:
            return
        self._leaves(sequence)
        self.slots.release(session.session_id)
        for route in (session.prefill, session.route):
            if route is not None:
                route.running -= 1
        self.kv_budget.ends(session.session_id)
        del self.sessions[session.session_id]
        self.misplaced.pop(session.session_id, None)
        sequence.session = session.sequence = None
        self.counters["started_sessions"] -= 1
        self.commands = [
            command
            for command in self.commands
            if not (isinstance(command, StartSession) and command.session == session.session_id)
        ]

    def close(self, session: Session) -> None:
        """Orders all agents that hold slots of a session to free them.

        Slots stay booked until then.

        The session that it is to become by a move is closed, too.
        """
        if session.moving is not None:
            self.fail_move(session.moving, "over")
        sequence = session.sequence
        if sequence is not None:
            self._leaves(sequence)
            sequence.session = session.sequence = None
        self.unclaimed.pop(session.session_id, None)
        self.misplaced.pop(session.session_id, None)
        session.closing = True
        self.kv_budget.leaves(session.session_id)
        for agent in self.slots.agents(session.session_id):
            if agent not in self.present:  # if it connects, it says what it holds
                self.were_freed(self.slots.release(session.session_id, agent))
        if session.session_id in self.slots:
            self.order_close(session)
        else:
            self.is_over(session.session_id)

    def _leaves(self, sequence: SequenceRequest) -> None:
        """Stops counting the session of a request as load of its worker."""
        model_queue = self.model_queues.get(sequence.model)
        if model_queue is not None and model_queue.placer is not None:
            model_queue.placer.leave(sequence.request)

    def order_close(self, session: Session) -> None:
        """Orders the agents of a session, perhaps again, to close it."""
        session.attempts += 1
        for agent in self.slots.agents(session.session_id):
            self.tell_to_close(agent, session.session_id)
        self.slots.expire_at(session.session_id, self.now + self.config.close_patience_ns)

    def tell_to_close(self, agent: AgentId, session: SessionId) -> None:
        """Adds the order to close a session to the commands for an agent."""
        self._orders.setdefault(agent, []).append(session)

    def let_go(self, session: SessionId, agent: AgentId) -> None:
        """Handles that an agent holds nothing of a session any more."""
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
        """Frees its place on the prompt's chain, whose agents have all released it."""
        prefill, session.prefill = session.prefill, None
        if prefill is None:
            return
        prefill.running -= 1
        self.kv_budget.left(session.session_id, prefill)
        if session.route is not None:
            session.hops = session.route.hops
        model = prefill.hops[0].partition.model
        model_queue = self.model_queues.get(model)
        if model_queue is not None:
            model_queue.waiting.offer(prefill)
            self.dirty[model] = None

    def were_freed(self, caches: list[Cache]) -> None:
        """Lets requests start where slots were freed."""
        for cache in caches:
            model = cache.partition.model
            model_queue = self.model_queues.get(model)
            if model_queue is not None:
                model_queue.waiting.freed(cache)
                self.dirty[model] = None

    def is_over(self, session_id: SessionId) -> None:
        """Ends a session of which no agent holds anything: its place on the chain is free.

        If a request is still open for it, the request waits for the gateway's word, and may be
        started again.
        """
        session = self.sessions.get(session_id)
        if session is None:
            return
        if session.arriving is not None:
            self.fail_move(session.arriving, "closed")
            return
        if session.sequence is not None:
            self._leaves(session.sequence)
        else:
            del self.sessions[session_id]
            self.unclaimed.pop(session_id, None)
        self._handed_over(session)
        self.kv_budget.ends(session_id)
        route, session.route = session.route, None
        if route is not None:
            route.running -= 1
            model = route.hops[0].partition.model
            model_queue = self.model_queues.get(model)
            if model_queue is not None:
                model_queue.session_ended(self.now)
                model_queue.waiting.offer(route)
                self.dirty[model] = None

    def refresh(self) -> None:
        """Updates which chains may be used."""
        self.availability_seen = self.availability.version
        for model, model_queue in self.model_queues.items():
            model_queue.refresh(self.availability)
            self.dirty[model] = None
        for request, sequence in list(self.resting.items()):
            if not self.model_queue(sequence.model).must_rest:
                del self.resting[request]
                self.model_queue(sequence.model).waiting.push(sequence)
        draining = self.availability.impaired_by(Impairment.DRAINING)
        if draining != self.draining:
            self.draining = draining
            self.find_misplaced()

    def find_misplaced(self) -> None:
        """Called when agents or plan changed; subclasses find the misplaced sessions."""

    # Moves

    def fail_move(self, move: Move, why: MoveFailure) -> None:
        """Gives a move up: the session stays where it is, if it still runs."""
        source, target = move.source, move.target
        self.counters["failed_moves"] += 1
        self.counters[f"failed_moves_{why}"] += 1
        self.failures[target.session_id] = why
        if len(self.failures) > _FAILURES:
            del self.failures[next(iter(self.failures))]
        self.unlink(move)
        placer = self.model_queue(move.sequence.model).placer
        if placer is not None:
            placer.unreserve(move.sequence.request)
        if why != "over":
            pause = self.config.move_pause_ns << min(source.failed_moves, 16)
            source.move_after = self.now + min(self.config.longest_move_pause_ns, pause)
            source.failed_moves += 1
            if source.hops and source.hops[0].agent in self.present:
                # The agent leads the move; agents that do not know a session answer that it is
                # closed.
                self.tell_to_close(source.hops[0].agent, target.session_id)
            source.closed_move = target.session_id if why == "closed" else None
        self.close(target)

    def unlink(self, move: Move) -> None:
        """Removes a move that is over, so that its agents have room for others."""
        del self.moves[move.target.session_id]
        for agent in move.agents:
            self.moves_at[agent] -= 1
            if not self.moves_at[agent]:
                del self.moves_at[agent]
        move.source.moving = move.target.arriving = None
        self.dirty[move.sequence.model] = None

    def take_commands(self) -> list[Command]:
        """Returns the commands of this event, beginning with what agents must free."""
        commands, self.commands = self.commands, []
        if self._orders:
            orders, self._orders = self._orders, {}
            closes: list[Command] = [
                CloseSessions(agent, tuple(dict.fromkeys(sessions)))
                for agent, sessions in orders.items()
            ]
            return closes + commands
        return commands
