"""State of the chained dispatcher: everything its handlers know, and nothing that they do."""

from __future__ import annotations

from typing import Literal, get_args

from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.breaker import CircuitBreakers
from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.placement.placer_figures import PLACEMENT_COUNTERS
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
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
from catenary_scheduler.dispatch.events import CloseSessions, Command
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Rebalancer
from catenary_scheduler.packing.transfers.migration_budget import MigrationBudget
from catenary_services.domain.ids import (
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    RequestId,
    SessionId,
)
from catenary_services.domain.plan import Plan

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
    """State of the chained dispatcher; each handler takes it as an argument.

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
        self.hosted: set[tuple[AgentId, PartitionKey]] = set()
        """Partitions of the plan in force, by agent."""
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

    def placer_of(self, model: ModelKey) -> SloPlacer | None:
        """Returns the placer of a model; None if its policy needs none."""
        return self.model_queue(model).placer

    def awaits_tokens(self, sequence: SequenceRequest) -> None:
        """Restarts the stall timer of a request whose session got or is about to get a token."""
        sequence.heard = self.now
        if self.next_stall_look is None:
            self.next_stall_look = self.now + self.config.stall_ns

    def check_later(self, sequence: SequenceRequest, grace_ns: Nanoseconds) -> None:
        """Gives a session up after `grace_ns` unless something is heard of it."""
        sequence.check_later = self.now + grace_ns
        self.timers.set(sequence, min(sequence.timer, sequence.check_later), len(self.sequences))

    def breakers_worked(self, session: Session) -> None:
        """Notes that the agents of a session compute."""
        if len(self.breakers):
            for hop in session.hops:
                self.breakers.worked(hop.agent, hop.partition, self.now)

    # Commands

    def tell_to_close(self, agent: AgentId, session: SessionId) -> None:
        """Adds the order to close a session to the commands for an agent."""
        self._orders.setdefault(agent, []).append(session)

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
