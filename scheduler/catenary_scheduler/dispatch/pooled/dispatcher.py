"""The dispatcher of pooled pipelines: folds events into queue, routes, tracker and book."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from catenary_scheduler.book import Book, Reservation, ReservationChange, Step
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    BatchFailed,
    BatchSlice,
    Command,
    DispatchBatch,
    Event,
    PlanActivated,
    PlannedHop,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    StageReported,
    Tick,
)
from catenary_scheduler.dispatch.pooled.batching import Dispatch, Drop, Wait, decide
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.dispatch.pooled.config import PooledConfig
from catenary_scheduler.dispatch.pooled.lifecycle import Lifecycle
from catenary_scheduler.dispatch.pooled.queue import ModelQueue
from catenary_scheduler.dispatch.pooled.tracking import Batch
from catenary_services.domain.ids import BatchId, ModelKey, Nanoseconds, RequestId


class PooledDispatcher:
    """Implements `Dispatcher` for pooled pipelines.

    Every `RequestArrived` ends in exactly one of: a `RequestCompleted` or `RequestCancelled` event,
    or a `Reject` command, at the latest `deadline_grace_ns` after its deadline.

    Args:
        config: Limits and waiting times.
        book: Where time is booked; one of its own if None.
        availability: Who can be given what; None: every agent that joined, everything.
        times: What agents really take; None: what the plan says, always.
        first_batch: Id of the first batch; the scheduler puts its epoch into the upper bits.
        stopwatch: Has every decision timed (choose pipeline and batch size, probe, reserve); see
            `take_decision_times`.
    """

    def __init__(
        self,
        config: PooledConfig | None = None,
        *,
        book: Book | None = None,
        availability: Availability | None = None,
        times: BookedTimes | None = None,
        first_batch: int = 1,
        stopwatch: Callable[[], Nanoseconds] | None = None,
    ) -> None:
        self._config = config or PooledConfig()
        self._stopwatch = stopwatch
        self._decision_ns: list[Nanoseconds] = []
        self._book = book if book is not None else Book()
        if availability is None:
            availability = Availability(everything_loaded=True)
        self._availability = availability
        self._life = Lifecycle(
            self._config, self._book, availability, times if times is not None else BookedTimes()
        )
        self._next_batch = first_batch

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Folds one event into the state and returns what is to be done, in order."""
        life = self._life
        self._book.prune(now)
        life.now = now
        match event:
            case RequestArrived():
                life.arrived(event)
            case StageReported():
                life.stage_reported(event)
            case RequestCompleted():
                life.completed(event)
            case RequestCancelled():
                life.cancelled(event)
            case BatchFailed():
                life.batch_failed(event)
            case AgentJoined():
                life.agent_joined(event)
            case AgentLost():
                life.agent_lost(event)
            case PlanActivated():
                life.plan_activated(event)
            case Tick():
                pass
        life.breakers.look(now)
        self._availability.expire(now)
        life.look_around()
        life.on_time()
        self._serve(now)
        commands, life.commands = life.commands, []
        return commands

    def next_wakeup(self) -> Nanoseconds | None:
        """When to send a `Tick` at the latest; None if nothing waits for time to pass."""
        moments = [queue.wake for queue in self._life.queues.values()]
        moments += [self._book.next_expiry(), self._life.tracker.next_timer()]
        moments.append(self._availability.next_expiry())
        return min((moment for moment in moments if moment is not None), default=None)

    # Recovery and observation

    @property
    def next_batch(self) -> int:
        """The id that the next batch will have; none was given out from there on."""
        return self._next_batch

    def take_changes(self) -> list[ReservationChange]:
        """Returns what changed in the book since the last call."""
        return self._book.take_changes()

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters the bookings of the scheduler before this one, their times on this clock."""
        self._book.restore(reservations)

    def snapshot(self) -> list[Reservation]:
        """Returns every reservation."""
        return self._book.snapshot()

    def open_requests(self) -> list[RequestId]:
        """Returns the requests that wait or are on their way."""
        return list(self._life.tracker.requests)

    def followed(self) -> list[BatchId]:
        """Returns the batches that requests wait for."""
        return list(self._life.tracker.batches)

    def statistics(self) -> dict[str, int]:
        """Returns counters since the start (names in the plural) and present gauges.

        `drift_*` compares the booked with the real end of every reported compute; its sum is over
        absolute values, so that early and late do not cancel out.
        """
        life = self._life
        return {
            **life.counters,
            "opened_circuits": life.breakers.opened,
            "queued_rows": sum(queue.rows for queue in life.queues.values()),
            "open_requests": len(life.tracker.requests),
            "batches_in_flight": len(life.tracker.batches),
            "booked_batches": len(self._book),
        }

    def take_decision_times(self) -> list[Nanoseconds]:
        """Returns how long each decision since the last call took; empty without a stopwatch."""
        times, self._decision_ns = self._decision_ns, []
        return times

    # Serving the queues

    def _serve(self, now: Nanoseconds) -> None:
        """Takes one decision after the other, the most urgent head of all models first."""
        life = self._life
        for queue in life.queues.values():
            if queue.wake is not None and queue.wake <= now:
                life.dirty[queue.model] = None
        while life.dirty:
            model = self._most_urgent(life.dirty)
            waiting = life.queues.get(model)
            if not waiting or self._step(waiting, now):
                life.dirty.pop(model, None)
        life.forget_idle_queues()

    def _most_urgent(self, models: dict[ModelKey, None]) -> ModelKey:
        if len(models) == 1:
            return next(iter(models))
        queues = self._life.queues
        waiting = [model for model in models if queues.get(model)]
        if not waiting:
            return next(iter(models))
        return min(waiting, key=lambda model: queues[model].head_key)

    def _step(self, queue: ModelQueue, now: Nanoseconds) -> bool:
        """Decides once for the head of a queue; True if the queue has to wait now."""
        life = self._life
        routes = life.routes.of(queue.model)
        if not routes:
            return life.without_route(queue)
        life.counters["decisions"] += 1
        stopwatch = self._stopwatch
        began = stopwatch() if stopwatch is not None else 0
        decision = self._elsewhere(queue, now) or decide(
            queue, routes, self._book, self._config, now
        )
        if isinstance(decision, Dispatch):
            batch = BatchId(self._next_batch)
            self._next_batch += 1
            steps = decision.path.steps
            self._book.reserve(batch, steps, life.overdue_at(decision.path.finish_ns))
            if stopwatch is not None:
                self._decision_ns.append(stopwatch() - began)
            self._send(queue, decision, batch, steps)
            return not queue
        if stopwatch is not None:
            self._decision_ns.append(stopwatch() - began)
        if isinstance(decision, Wait):
            queue.wake = decision.until
            return True
        life.drop(queue.head, decision.earliest_finish)
        return not queue

    def _elsewhere(self, queue: ModelQueue, now: Nanoseconds) -> Dispatch | Wait | None:
        """Decides for rows that are to avoid agents, if they can do without those in time."""
        avoid = queue.head.avoid
        if not avoid:
            return None
        with self._life.routes.avoiding(queue.model, avoid) as detour:
            if not detour.routes:
                return None
            decision = decide(queue, detour.routes, self._book, self._config, now)
        return None if isinstance(decision, Drop) else decision

    def _send(
        self, queue: ModelQueue, decision: Dispatch, batch_id: BatchId, steps: list[Step]
    ) -> None:
        life = self._life
        finish = decision.path.finish_ns
        rows = queue.take(decision.rows, finish)
        if not any(part.attempt for part in rows):
            life.first_dispatched()
        slices = []
        batch_row = 0
        for part in rows:
            slices.append(BatchSlice(part.request.request_id, part.first, part.count, batch_row))
            batch_row += part.count
        hops = tuple(
            PlannedHop(
                step.member.agent,
                partition,
                step.start,
                step.compute_ns,
                step.transfer_start,
                step.transfer_ns,
            )
            for step, partition in zip(steps, decision.route.partitions, strict=True)
        )
        agents = tuple([hop.agent for hop in hops])
        life.tracker.add_batch(Batch(batch_id, rows, agents, decision.route.partitions))
        life.commands.append(DispatchBatch(batch_id, batch_row, tuple(slices), hops, finish))
        life.counters["dispatched_batches"] += 1
        life.counters["dispatched_rows"] += batch_row
        if len(life.breakers):
            for hop in hops:
                life.breakers.given(hop.agent, hop.partition, life.now)
            life.look_around()  # if that was a probe, others go elsewhere
        for other in life.routes.contenders(queue.model):
            if other in life.queues:  # its last safe moment may be earlier now
                life.dirty[other] = None
