"""State of the chained dispatcher: everything its handlers know, and nothing that they do."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.breaker import CircuitBreakers
from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.placement.placer_figures import PLACEMENT_COUNTERS
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.chained.queues.failure_backoff import FailureBackoff
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.queues.wait_queue import PolicyFactory
from catenary_scheduler.dispatch.chained.sessions.history import SessionHistory
from catenary_scheduler.dispatch.chained.sessions.kv_budget import KvBudget
from catenary_scheduler.dispatch.chained.sessions.move_table import MOVE_COUNTERS, MoveTable
from catenary_scheduler.dispatch.chained.states import RequestState, SessionState, Transition
from catenary_scheduler.dispatch.chained.tracking import (
    CauseEvent,
    RequestTimers,
    SequenceRequest,
    Session,
    StoryStep,
)
from catenary_scheduler.dispatch.events import CloseSessions, Command, Event, Tick
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Rebalancer
from catenary_scheduler.dispatch.placing.worker import Worker
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
    "lacked_prefixes",
    "illegal_transitions",
    *MOVE_COUNTERS,
)
_STEPS: Final = 64
"""The most steps of one story; beyond them, steps after the first few are dropped."""
_FIRST_STEPS: Final = 8
_REQUEST: Final = SessionId(0)
"""Stands for the request in its story."""


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
        self.event = 0
        """Number of the event in hand."""
        self._event: Event = Tick()
        self._cause: CauseEvent | None = None
        """The event in hand as a cause; None until it has caused anything."""
        self.history = SessionHistory()
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
        self.moves = MoveTable()
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
                rebalancer = Rebalancer[Worker]() if self.config.rebalance else None
                model_queue.placer.connect(self.lengths_of(model), self.counters, rebalancer)
        return model_queue

    def lengths_of(self, model: ModelKey) -> LengthPredictor:
        """Returns the predictor of a model's answer lengths, made on first use."""
        known = self.lengths.get(model)
        if known is None:
            known = self.lengths[model] = LengthPredictor()
        return known

    def begin(self, event: Event, now: Nanoseconds) -> None:
        """Takes the next event in hand."""
        self.now = now
        self.event += 1
        self._event = event
        self._cause = None

    # Changes of state

    def request_goes(
        self, sequence: SequenceRequest, way: Transition[RequestState], why: str = ""
    ) -> None:
        """Changes the state of a request.

        Args:
            sequence: The request.
            way: The transition.
            why: Particulars for its story.

        Raises:
            AssertionError: The way does not lead from its state, and the configuration says
                `checked`.
        """
        if sequence.state not in way.sources:
            self._illegal(sequence.state, way.name)
        session = sequence.session
        ordered = session.ordered if session is not None else 0
        self._note(sequence.story, _REQUEST, sequence.state, way, why, ordered)
        sequence.state = way.target

    def session_goes(self, session: Session, way: Transition[SessionState], why: str = "") -> None:
        """Changes the state of a session; see `request_goes`."""
        if session.state not in way.sources:
            self._illegal(session.state, way.name)
        self._note(session.story, session.session_id, session.state, way, why, session.ordered)
        session.state = way.target

    def _note(
        self,
        story: list[StoryStep],
        session: SessionId,
        before: StrEnum,
        way: Transition[Any],
        why: str,
        ordered: int,
    ) -> None:
        cause = self._cause
        if cause is None:
            cause = self._cause = CauseEvent(self.event, self.now, type(self._event))
        if len(story) >= _STEPS:
            # One step, or as many as are too many since `assign` joined two stories.
            del story[_FIRST_STEPS : _FIRST_STEPS + len(story) - _STEPS + 1]
        story.append(StoryStep(cause, ordered, session, before, way, why))

    def _illegal(self, state: str, name: str) -> None:
        if self.config.checked:
            raise AssertionError(f"{name!r} cannot happen in the state {str(state)!r}")
        self.counters["illegal_transitions"] += 1

    def assign(self, session: Session, sequence: SequenceRequest) -> None:
        """Makes a session the one that generates for a request."""
        if session.story is not sequence.story:
            sequence.story += session.story
            session.story = sequence.story
        session.sequence, sequence.session = sequence, session

    # Lookups

    def story(self, key: RequestId | SessionId) -> list[StoryStep]:
        """Returns what happened to a request and its sessions in order; empty if it is not known.

        Args:
            key: The request, or one of its sessions.
        """
        known: SequenceRequest | Session | None
        known = self.sequences.get(key) if isinstance(key, RequestId) else self.sessions.get(key)
        steps = known.story if known is not None else self.history.story(key)
        # A session that was found brings its own story with it when it is claimed.
        return sorted(steps, key=_number)

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
                CloseSessions(agent, tuple(dict.fromkeys(sessions)), cause=self.event)
                for agent, sessions in orders.items()
            ]
            return closes + commands
        return commands


def _number(step: StoryStep) -> int:
    return step.cause.number
