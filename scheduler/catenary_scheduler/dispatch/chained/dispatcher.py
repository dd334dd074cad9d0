"""The dispatcher of server chains: folds events into queue, chains, sessions and cache slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from catenary_scheduler.book import Book, Reservation, ReservationChange
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.chained.admission.lifecycle import ChainLifecycle
from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.migration.resettling import resettle
from catenary_scheduler.dispatch.chained.packing.line import SessionPacking
from catenary_scheduler.dispatch.chained.placement.board_statistics import placement_statistics
from catenary_scheduler.dispatch.chained.queues.desk import ModelQueue
from catenary_scheduler.dispatch.chained.queues.lines import PolicyFactory
from catenary_scheduler.dispatch.chained.queues.policies import policy_factory
from catenary_scheduler.dispatch.chained.sessions.views import (
    BookedSession,
    SessionView,
    claims_of,
    view_of,
    views_of,
)
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
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
)
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, RequestId, SessionId


class ChainedDispatcher:
    """Implements `Dispatcher` for server chains.

    Every `SessionRequested` ends in exactly one of: a `RequestCompleted` or `RequestCancelled`
    event, or a `Reject` command, at the latest `deadline_grace_ns` after its deadline. Slots of a
    session are free when each of its agents said `SessionsClosed`, or was lost.

    Args:
        config: Limits and waiting times.
        book: Where slots are booked; one of its own if None.
        availability: Who can be given what; None: every agent that joined, everything.
        policy: "jffc" (default), "slo", or what makes a policy per model.
        first_session: Id of the first session; the scheduler puts its epoch into the upper bits.
            Lower ids are those of schedulers before.
        stopwatch: Has every decision timed (choose a chain, reserve); see `take_decision_times`.

    Raises:
        InvalidInput: If there is no such policy.
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
        self._life = ChainLifecycle(config, slots, availability, policy, first_session)
        self._packing = SessionPacking(self._life, config.packing)

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:  # noqa: PLR0912
        """Folds one event into the state and returns what is to be done, in order.

        Events of other kinds of plans are none of its business and ignored.
        """
        life = self._life
        life.now = now
        match event:
            case SessionRequested():
                life.requested(event)
            case SessionsClosed():
                life.sessions_closed(event)
            case RequestCompleted():
                life.completed(event)
            case RequestCancelled():
                life.cancelled(event)
            case SessionFailed():
                life.session_failed(event)
            case SessionMoved():
                life.session_moved(event)
            case MoveRequested():
                life.move_wanted(event)
            case SessionsHeld():
                life.sessions_held(event)
            case SessionsFound():
                life.sessions_found(event)
            case SessionsProgressed():
                life.progressed(event)
            case LatencyRefitted():
                life.refitted(event)
            case MoveCostsMeasured():
                life.boundaries_measured(event)
            case CachesReported():
                life.caches_reported(event)
            case AgentJoined():
                life.agent_joined(event)
                self._packing.agent_joined(event.agent)
            case AgentLost():
                life.agent_lost(event)
            case PlanActivated():
                life.plan_activated(event)
                self._packing.plan_activated()
            case Tick():
                pass
        availability = self._availability
        life.breakers.look(now)
        availability.expire(now)
        if availability.version != life.availability_seen:
            life.refresh()
        life.on_time()
        if life.dirty:
            self._serve()
        self._packing.after_event()
        return life.take_commands()

    def next_wakeup(self) -> Nanoseconds | None:
        """When to send a `Tick` at the latest; None if nothing waits for time to pass."""
        moment, epoch = self._life.next_moment(), self._packing.next_moment()
        if moment is None or epoch is None:
            return moment if epoch is None else epoch
        return min(moment, epoch)

    def has(self, request: RequestId) -> bool:
        """True while a request is open here."""
        return request in self._life.tickets

    def queued(self, model: ModelKey) -> int:
        """Returns how many requests for a model wait for a chain."""
        life = self._life
        desk = life.desks.get(model)
        resting = sum(ticket.model == model for ticket in life.resting.values())
        return resting + (len(desk.line) if desk is not None else 0)

    def chains_needed(self, model: ModelKey) -> int:
        """Returns how many chains the sessions of a model would need if they were packed anew.

        0 for a model whose sessions are not packed onto few chains.
        """
        return self._packing.needed(model)

    def tokens_by_agent(self) -> dict[AgentId, int]:
        """Returns the tokens that are cached on agents, each session's once per agent."""
        found: dict[AgentId, int] = {}
        for ticket in self._life.tickets.values():
            if ticket.session is not None:
                for agent in {hop.agent for hop in ticket.session.hops}:
                    found[agent] = found.get(agent, 0) + ticket.tokens
        return found

    # Recovery and observation

    @property
    def next_session(self) -> int:
        """The id that the next session will have; none was given out from there on."""
        return self._life.next_session

    def take_changes(self) -> list[ReservationChange]:
        """Returns what changed in the book since the last call."""
        return self._book.take_changes()

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters the bookings of the scheduler before this one, their times on this clock."""
        self._book.restore(reservations)
        self.restored()

    def restored(self) -> None:
        """Takes note of sessions that were entered into the book from outside."""
        self._life.restored()

    def length_predictors(self) -> dict[ModelKey, LengthPredictor]:
        """Returns what is known of answer lengths, by model; it goes on learning."""
        return self._life.lengths

    def restore_lengths(self, model: ModelKey, predictor: LengthPredictor) -> None:
        """Goes on with what a scheduler before this one knew of a model's answer lengths."""
        self._life.lengths[model] = predictor
        desk = self._life.desks.get(model)
        if desk is not None and desk.board is not None:
            desk.board.lengths = predictor

    def sessions(self) -> list[SessionView]:
        """Returns the session of every request that has one, by id."""
        return list(views_of(self._life))

    def session_of(self, request: RequestId) -> SessionView | None:
        """Returns the session that generates for a request, if it has one."""
        ticket = self._life.tickets.get(request)
        if ticket is None or ticket.session is None:
            return None
        return view_of(ticket.session, ticket)

    def view(self, session: SessionId) -> SessionView | None:
        """Returns a session by its id, as long as it is that of a request."""
        known = self._life.sessions.get(session)
        return view_of(known, known.ticket) if known is not None and known.ticket else None

    def claims(self) -> list[BookedSession]:
        """Returns every session with what is booked for it and why, by id."""
        return claims_of(self._life)

    def open_requests(self) -> list[RequestId]:
        """Returns the requests that wait or have a session."""
        return list(self._life.tickets)

    def move_failure(self, session: SessionId) -> str:
        """Returns why a session did not become this one, if that was a while ago at most."""
        return self._life.failures.get(session, "")

    def problem(self, session: SessionId, chain_id: str) -> str:
        """Returns in words why a session cannot be moved now; empty if it can.

        Args:
            session: Which.
            chain_id: Where to; empty: wherever is best.
        """
        return self._life.problem(session, chain_id)

    def snapshot(self) -> list[Reservation]:
        """Returns every reservation."""
        return self._book.snapshot()

    def statistics(self) -> dict[str, int]:
        """Returns counters since the start (names in the plural) and present gauges."""
        life = self._life
        caches = life.slots.caches()
        return {
            **life.counters,
            "opened_circuits": life.breakers.opened,
            "queued_requests": sum(len(desk.line) for desk in life.desks.values())
            + len(life.resting),
            "open_requests": len(life.tickets),
            "sessions_in_flight": len(life.sessions),
            "moving_sessions": len(life.moves),
            "stray_sessions": len(life.strays),
            "booked_sessions": len(life.slots),
            "booked_slots": sum(cache.used for cache in caches),
            "block_slots": sum(cache.capacity for cache in caches),
            "usable_chains": sum(desk.usable for desk in life.desks.values()),
            **placement_statistics([desk.board for desk in life.desks.values()]),
            **self._packing.statistics(),
        }

    def take_decision_times(self) -> list[Nanoseconds]:
        """Returns how long each decision since the last call took; empty without a stopwatch."""
        times, self._decision_ns = self._decision_ns, []
        return times

    # Serving the queues

    def _serve(self) -> None:
        """Moves strays, then starts whoever waits and finds a free chain, one after the other."""
        life = self._life
        while life.dirty:
            seen = life.availability_seen
            for model in list(life.dirty):
                self._serve_model(model)
            life.dirty.clear()
            if life.availability_seen != seen:  # one was a probe: others have other chains now
                life.dirty.update(dict.fromkeys(life.desks))

    def _serve_model(self, model: ModelKey) -> None:
        life = self._life
        if life.strays:
            life.move_strays(model)
        desk = life.desks.get(model)
        while desk is not None and desk.line:
            started = self._start(desk)
            # Who was moved and found no place waits again, and is looked at once more.
            if not (started and life.config.rebalance and resettle(life, desk, started)):
                break

    def _start(self, desk: ModelQueue) -> list[SequenceRequest]:
        """Starts whoever waits at a desk and finds a free chain, and returns them."""
        life, stopwatch = self._life, self._stopwatch
        started = []
        while desk.line:
            began = stopwatch() if stopwatch is not None else 0
            turn = desk.line.next(life.now)
            if turn is None:
                break
            life.start(*turn)
            if self._availability.version != life.availability_seen:  # that was a probe
                life.refresh()
            self._packing.started(turn[0])
            started.append(turn[0])
            life.counters["decisions"] += 1
            if stopwatch is not None:
                self._decision_ns.append(stopwatch() - began)
        return started
