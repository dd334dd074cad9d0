"""The dispatcher of server chains: folds events into queue, chains, sessions and cache slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from catenary_scheduler.book import Book, Reservation, ReservationChange
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.chained.admission.adoption import SessionAdoption
from catenary_scheduler.dispatch.chained.admission.cluster_events import ClusterEvents
from catenary_scheduler.dispatch.chained.admission.preemption import SessionPreemption
from catenary_scheduler.dispatch.chained.admission.request_events import RequestEvents
from catenary_scheduler.dispatch.chained.admission.session_events import SessionEvents
from catenary_scheduler.dispatch.chained.admission.timeouts import SessionTimeouts
from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.migration.evacuation import SessionEvacuation
from catenary_scheduler.dispatch.chained.migration.moving import SessionMigration
from catenary_scheduler.dispatch.chained.migration.rebalancing import SessionRebalancing
from catenary_scheduler.dispatch.chained.packing.session_packing import SessionPacking
from catenary_scheduler.dispatch.chained.placement.placer_statistics import placement_statistics
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.queues.policies import policy_factory
from catenary_scheduler.dispatch.chained.queues.wait_queue import PolicyFactory
from catenary_scheduler.dispatch.chained.sessions.booking import SessionBooking
from catenary_scheduler.dispatch.chained.sessions.chain_offers import ChainOffers
from catenary_scheduler.dispatch.chained.sessions.closing import SessionClosing
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.misplaced import MisplacedSessions
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.sessions.validation import validate
from catenary_scheduler.dispatch.chained.sessions.views import (
    BookedSession,
    SessionView,
    claims_of,
    view_of,
    views_of,
)
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, StoryStep
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    CachesReported,
    Command,
    Event,
    LatencyRefitted,
    MoveCostsMeasured,
    MoveRequested,
    PlanActivated,
    RequestCancelled,
    RequestCompleted,
    SessionFailed,
    SessionMoved,
    SessionRequested,
    SessionsClosed,
    SessionsFound,
    SessionsHeld,
    SessionsProgressed,
    Tick,
    earlier,
)
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, RequestId, SessionId


class ChainedDispatcher:
    """Implements `Dispatcher` for server chains.

    Every `SessionRequested` ends in exactly one of: a `RequestCompleted` or `RequestCancelled`
    event, or a `Reject` command, at the latest `deadline_grace_ns` after its deadline. The slots of
    a session are free when each of its agents said `SessionsClosed`, or was lost.

    Args:
        config: Limits and waiting times.
        book: The book in which slots are booked; None: a new one.
        availability: The view of which agents can be given work; None: every agent that joined can
            be given everything.
        policy: "jffc" (default), "slo", "least-time" (a deployment's default), or a function that
            makes a policy per model.
        first_session: Id of the first session; the scheduler puts its epoch into the upper bits.
            Lower ids belong to earlier schedulers.
        stopwatch: Measures every decision (choose a chain, reserve); see `take_decision_times`.

    Raises:
        InvalidInput: There is no such policy.
    """

    def __init__(
        self,
        config: ChainedConfig | None = None,
        book: Book | None = None,
        *,
        availability: Availability | None = None,
        policy: str | PolicyFactory = "jffc",
        first_session: int = 1,
        stopwatch: Callable[[], Nanoseconds] | None = None,
    ) -> None:
        self._book = book if book is not None else Book()
        self._stopwatch = stopwatch
        self._decision_ns: list[Nanoseconds] = []
        slots = self._book.slots
        config = config or ChainedConfig()
        if isinstance(policy, str):
            policy = policy_factory(policy)
        if availability is None:
            availability = Availability(everything_loaded=True)
        self._availability = availability
        table = SessionTable(config, slots, availability, policy, first_session)
        misplaced = MisplacedSessions(table)
        offers = ChainOffers(table, misplaced)
        closing = SessionClosing(table, offers)
        booking = SessionBooking(table, closing)
        ledger = RequestLedger(table, closing)
        migration = SessionMigration(table, booking, closing, ledger, offers, misplaced)
        evacuation = SessionEvacuation(table, migration)
        adoption = SessionAdoption(table, closing, ledger, migration)
        preemption = SessionPreemption(table, closing, ledger, migration, offers)
        self._table = table
        self._offers = offers
        self._booking = booking
        self._migration = migration
        self._evacuation = evacuation
        self._adoption = adoption
        self._preemption = preemption
        self._rebalancing = SessionRebalancing(table, booking, ledger)
        self._packing = SessionPacking(table, migration, config.packing)
        self._requests = RequestEvents(table, ledger, adoption)
        self._sessions = SessionEvents(table, closing, ledger, migration, preemption, offers)
        self._cluster = ClusterEvents(table, ledger, adoption, offers, misplaced)
        self._timeouts = SessionTimeouts(table, closing, ledger, migration, evacuation, adoption)

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:  # noqa: PLR0912
        """Folds one event into the state and returns the commands that follow, in order.

        Events of other kinds of plans are ignored.
        """
        table = self._table
        table.begin(event, now)
        match event:
            case SessionRequested():
                self._requests.requested(event)
            case SessionsClosed():
                self._sessions.sessions_closed(event)
            case RequestCompleted():
                self._requests.completed(event)
            case RequestCancelled():
                self._requests.cancelled(event)
            case SessionFailed():
                self._sessions.session_failed(event)
            case SessionMoved():
                self._migration.session_moved(event)
            case MoveRequested():
                self._evacuation.move_requested(event)
            case SessionsHeld():
                self._cluster.sessions_held(event)
            case SessionsFound():
                self._cluster.sessions_found(event)
            case SessionsProgressed():
                self._sessions.progressed(event)
            case LatencyRefitted():
                self._cluster.refitted(event)
            case MoveCostsMeasured():
                self._cluster.move_costs_measured(event)
            case CachesReported():
                self._preemption.caches_reported(event)
            case AgentJoined():
                self._cluster.agent_joined(event)
                self._packing.agent_joined(event.agent)
            case AgentLost():
                self._cluster.agent_lost(event)
            case PlanActivated():
                self._cluster.plan_activated(event)
                self._packing.plan_activated()
            case Tick():
                pass
        return self._follow()

    def _follow(self) -> list[Command]:
        """Returns the commands that follow once an event was taken in."""
        table, now = self._table, self._table.now
        availability = self._availability
        table.breakers.look(now)
        availability.expire(now)
        if availability.version != table.availability_seen:
            self._offers.refresh()
        self._timeouts.on_time()
        if table.dirty:
            self._serve()
        self._packing.after_event()
        if table.config.checked:
            validate(table)
        return table.take_commands()

    def next_wakeup(self) -> Nanoseconds | None:
        """Returns when to send a `Tick` at the latest; None if nothing waits for time to pass."""
        return earlier(self._timeouts.next_moment(), self._packing.next_moment())

    def has(self, request: RequestId) -> bool:
        """True while a request is open at this dispatcher."""
        return request in self._table.sequences

    def queued(self, model: ModelKey) -> int:
        """Returns the number of requests for a model that wait for a chain."""
        table = self._table
        model_queue = table.model_queues.get(model)
        resting = sum(sequence.model == model for sequence in table.resting.values())
        return resting + (len(model_queue.waiting) if model_queue is not None else 0)

    def chains_needed(self, model: ModelKey) -> int:
        """Returns how many chains the sessions of a model would need if they were packed anew.

        0 for a model whose sessions are not packed onto few chains.
        """
        return self._packing.needed(model)

    def tokens_by_agent(self) -> dict[AgentId, int]:
        """Returns the tokens cached on each agent; every session counts once per agent."""
        found: dict[AgentId, int] = {}
        for sequence in self._table.sequences.values():
            if sequence.session is not None:
                for agent in {hop.agent for hop in sequence.session.hops}:
                    found[agent] = found.get(agent, 0) + sequence.tokens
        return found

    # Recovery and observation

    @property
    def next_session(self) -> int:
        """The id of the next session; it and all higher ones are unused."""
        return self._table.next_session

    def take_changes(self) -> list[ReservationChange]:
        """Returns the changes of the book since the last call."""
        return self._book.take_changes()

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters the bookings of an earlier scheduler, with times on this clock."""
        self._book.restore(reservations)
        self.restored()

    def restored(self) -> None:
        """Takes note of sessions that were entered into the book from outside."""
        self._adoption.restored()

    def length_predictors(self) -> dict[ModelKey, LengthPredictor]:
        """Returns the predictors of answer lengths by model; they go on learning."""
        return self._table.lengths

    def restore_lengths(self, model: ModelKey, predictor: LengthPredictor) -> None:
        """Takes over the predictor that an earlier scheduler had for a model."""
        self._table.lengths[model] = predictor
        model_queue = self._table.model_queues.get(model)
        if model_queue is not None and model_queue.placer is not None:
            model_queue.placer.requests.lengths = predictor

    def sessions(self) -> list[SessionView]:
        """Returns the session of every request that has one, by id."""
        return list(views_of(self._table))

    def session_of(self, request: RequestId) -> SessionView | None:
        """Returns the session that generates for a request, if it has one."""
        sequence = self._table.sequences.get(request)
        if sequence is None or sequence.session is None:
            return None
        return view_of(sequence.session, sequence)

    def view(self, session: SessionId) -> SessionView | None:
        """Returns a session by its id; None unless a request has it."""
        known = self._table.sessions.get(session)
        return view_of(known, known.sequence) if known is not None and known.sequence else None

    def claims(self) -> list[BookedSession]:
        """Returns every session with its bookings and their purpose, by id."""
        return claims_of(self._table)

    def open_requests(self) -> list[RequestId]:
        """Returns the requests that wait or have a session."""
        return list(self._table.sequences)

    def story(self, key: RequestId | SessionId) -> list[StoryStep]:
        """Returns what happened to a request and its sessions, and why; empty if it is not known.

        Args:
            key: The request, or one of its sessions. It may have ended a while ago.
        """
        return self._table.story(key)

    def move_failure(self, session: SessionId) -> str:
        """Returns why a recent move to this session failed; empty if none did."""
        return self._table.moves.failures.get(session, "")

    def problem(self, session: SessionId, chain_id: str) -> str:
        """Returns in words why a session cannot be moved now; empty if it can.

        Args:
            session: The session.
            chain_id: The chain to move to; empty: the best one.
        """
        return self._evacuation.problem(session, chain_id)

    def snapshot(self) -> list[Reservation]:
        return self._book.snapshot()

    def statistics(self) -> dict[str, int]:
        """Returns counters since the start (names in the plural) and present gauges."""
        table = self._table
        caches = table.slots.caches()
        return {
            **table.counters,
            "opened_circuits": table.breakers.opened,
            "queued_requests": sum(
                len(model_queue.waiting) for model_queue in table.model_queues.values()
            )
            + len(table.resting),
            "open_requests": len(table.sequences),
            "sessions_in_flight": len(table.sessions),
            "moving_sessions": len(table.moves),
            "misplaced_sessions": len(table.misplaced),
            "booked_sessions": len(table.slots),
            "booked_slots": sum(cache.used for cache in caches),
            "block_slots": sum(cache.capacity for cache in caches),
            "usable_chains": sum(model_queue.usable for model_queue in table.model_queues.values()),
            **placement_statistics(
                [model_queue.placer for model_queue in table.model_queues.values()]
            ),
            **self._packing.statistics(),
        }

    def take_decision_times(self) -> list[Nanoseconds]:
        """Returns the nanoseconds of each decision since the last call.

        Empty without a stopwatch.
        """
        times, self._decision_ns = self._decision_ns, []
        return times

    # Serving the queues

    def _serve(self) -> None:
        """Moves misplaced sessions, then starts one by one the requests that find a free chain."""
        table = self._table
        while table.dirty:
            seen = table.availability_seen
            for model in list(table.dirty):
                self._serve_model(model)
            table.dirty.clear()
            if table.availability_seen != seen:  # one was a probe: the others have other chains now
                table.dirty.update(dict.fromkeys(table.model_queues))

    def _serve_model(self, model: ModelKey) -> None:
        table = self._table
        if table.misplaced:
            self._evacuation.evacuate(model)
        model_queue = table.model_queues.get(model)
        if table.slots.devices and model_queue is not None and model_queue.placer is not None:
            model_queue.placer.wait_for_batches(table.now)
        while model_queue is not None and model_queue.waiting:
            started = self._start(model_queue)
            # A request that was moved and found no place waits again, and is looked at once more.
            rebalances = started and table.config.rebalance
            if not (rebalances and self._rebalancing.rebalance(model_queue, started)):
                break

    def _start(self, model_queue: ModelQueue) -> list[SequenceRequest]:
        """Starts the waiting requests of a model that find a free chain, and returns them."""
        table, stopwatch = self._table, self._stopwatch
        started = []
        while model_queue.waiting:
            began = stopwatch() if stopwatch is not None else 0
            turn = model_queue.waiting.next(table.now)
            if turn is None:
                break
            sequence, route = turn
            self._booking.start(sequence, route)
            if self._availability.version != table.availability_seen:  # that was a probe
                self._offers.refresh()
            self._packing.started(sequence)
            started.append(sequence)
            table.counters["decisions"] += 1
            if stopwatch is not None:
                self._decision_ns.append(stopwatch() - began)
        return started
