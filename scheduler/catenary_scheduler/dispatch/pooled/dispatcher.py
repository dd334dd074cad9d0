"""The dispatcher of pooled pipelines: folds events into queue, routes, tracker and book."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from catenary_scheduler.book import Book, PathHop, Reservation, ReservationChange
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
    StageStarted,
    Tick,
    WindowReported,
    earlier,
)
from catenary_scheduler.dispatch.pooled.batching import (
    DispatchDecision,
    DropDecision,
    WaitDecision,
    decide,
    overflow,
)
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.dispatch.pooled.config import PooledConfig
from catenary_scheduler.dispatch.pooled.lifecycle import PooledLifecycle
from catenary_scheduler.dispatch.pooled.routes import Route
from catenary_scheduler.dispatch.pooled.row_queue import RowQueue
from catenary_scheduler.dispatch.pooled.tracking import Batch, Request, RowRange
from catenary_scheduler.dispatch.pooled.windows import WINDOW_IDS
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    BatchId,
    ModelKey,
    Nanoseconds,
    RequestId,
)

_LOOK_AGAIN_NS = 5 * NANOSECONDS_PER_MILLISECOND
"""Rows with nothing but routes through pools of others look there again this much later."""


class PooledDispatcher:
    """Implements `Dispatcher` for pooled pipelines.

    Every `RequestArrived` ends in exactly one of: a `RequestCompleted` or `RequestCancelled` event,
    or a `Reject` command, at the latest `deadline_grace_ns` after its deadline.

    Args:
        config: Limits and waiting times.
        book: The book in which time is booked; None: a new one.
        availability: The view of which agents can be given work; None: every agent that joined can
            be given everything.
        times: The times that agents really take; None: always those of the plan.
        first_batch: Id of the first batch; the scheduler puts its epoch into the upper bits.
        stopwatch: Measures every decision (choose pipeline and batch size, probe, reserve); see
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
        self._state = PooledLifecycle(
            self._config, self._book, availability, times if times is not None else BookedTimes()
        )
        self._next_batch = first_batch

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Folds one event into the state and returns the commands that follow, in order."""
        state = self._state
        self._book.prune(now)
        state.now = now
        match event:
            case RequestArrived():
                state.arrived(event)
            case StageReported():
                state.stage_reported(event)
            case StageStarted():
                state.stage_started(event)
            case RequestCompleted():
                state.completed(event)
            case RequestCancelled():
                state.cancelled(event)
            case WindowReported():
                state.window_reported(event)
            case BatchFailed():
                state.batch_failed(event)
            case AgentJoined():
                state.agent_joined(event)
            case AgentLost():
                state.agent_lost(event)
            case PlanActivated():
                state.plan_activated(event)
            case Tick():
                pass
        state.breakers.look(now)
        self._availability.expire(now)
        state.look_around()
        state.on_time()
        self._serve(now)
        commands, state.commands = state.commands, []
        return commands + state.windows.take_commands() if state.windows.commands else commands

    def look_again(self) -> None:
        """Has the next event decide anew for all rows that wait."""
        self._state.dirty.update(dict.fromkeys(self._state.queues))

    def next_wakeup(self) -> Nanoseconds | None:
        """Returns when to send a `Tick` at the latest; None if nothing waits for time to pass."""
        state = self._state
        moment = earlier(self._book.next_expiry(), state.tracker.next_timer())
        moment = earlier(moment, self._availability.next_expiry())
        if state.windows.active:
            moment = earlier(moment, state.windows.next_end())
        for queue in state.queues.values():
            moment = earlier(moment, queue.wake)
        return moment

    # Recovery and observation

    @property
    def next_batch(self) -> int:
        """The id of the next batch; it and all higher ones are unused."""
        return self._next_batch

    def take_changes(self) -> list[ReservationChange]:
        """Returns the changes of the book since the last call."""
        return self._book.take_changes()

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters the bookings of an earlier scheduler, with times on this clock."""
        self._book.restore(reservations)

    def snapshot(self) -> list[Reservation]:
        return self._book.snapshot()

    def open_requests(self) -> list[RequestId]:
        """Returns the requests that wait or are in flight."""
        return list(self._state.tracker.requests)

    def followed(self) -> list[BatchId]:
        """Returns the batches that requests wait for."""
        return list(self._state.tracker.batches)

    def statistics(self) -> dict[str, int]:
        """Returns counters since the start (names in the plural) and present gauges.

        `drift_*` compares the booked with the real end of every reported compute; its sum is over
        absolute values, so that early and late do not cancel out.
        """
        state = self._state
        return {
            **state.counters,
            **state.windows.counters,
            "opened_circuits": state.breakers.opened,
            "queued_rows": sum(queue.rows for queue in state.queues.values()),
            "open_requests": len(state.tracker.requests),
            "batches_in_flight": len(state.tracker.batches),
            "booked_batches": len(self._book),
        }

    def take_decision_times(self) -> list[Nanoseconds]:
        """Returns the nanoseconds of each decision since the last call.

        Empty without a stopwatch.
        """
        times, self._decision_ns = self._decision_ns, []
        return times

    # Serving the queues

    def _serve(self, now: Nanoseconds) -> None:
        """Decides one by one, always for the most urgent head of all models."""
        state = self._state
        for queue in state.queues.values():
            if queue.wake is not None and queue.wake <= now:
                state.dirty[queue.model] = None
        while state.dirty:
            model = self._most_urgent(state.dirty)
            waiting = state.queues.get(model)
            if not waiting or self._step(waiting, now):
                state.dirty.pop(model, None)
        state.forget_idle_queues()

    def _most_urgent(self, models: dict[ModelKey, None]) -> ModelKey:
        if len(models) == 1:
            return next(iter(models))
        queues = self._state.queues
        waiting = [model for model in models if queues.get(model)]
        if not waiting:
            return next(iter(models))
        return min(waiting, key=lambda model: queues[model].head_key)

    def _step(self, queue: RowQueue, now: Nanoseconds) -> bool:
        """Decides once for the head of a queue; True if the queue has to wait now."""
        state = self._state
        routes = state.routes.of(queue.model)
        shared = state.routes.shared_of(queue.model)
        if not routes and not shared:
            return state.without_route(queue)
        state.counters["decisions"] += 1
        stopwatch = self._stopwatch
        began = stopwatch() if stopwatch is not None else 0
        decision: DispatchDecision | WaitDecision | DropDecision | None = None
        if routes:
            decision = self._elsewhere(queue, now) or decide(
                queue, routes, self._book, self._config, now
            )
        if shared and (decision is None or isinstance(decision, DropDecision)):
            decision = overflow(queue, shared, now) or decision
        if isinstance(decision, DispatchDecision):
            batch = BatchId(self._next_batch)
            self._next_batch += 1
            steps = decision.path.steps
            self._book.reserve(batch, steps, state.overdue_at(decision.path.finish_ns))
            if stopwatch is not None:
                self._decision_ns.append(stopwatch() - began)
            self._send(queue, decision, batch, steps)
            return not queue
        if stopwatch is not None:
            self._decision_ns.append(stopwatch() - began)
        if isinstance(decision, WaitDecision):
            queue.wake = decision.until
            return True
        if decision is None:
            is_done = state.without_route(queue)
            if queue.wake is not None:  # a little later, there may be time left
                queue.wake = min(queue.wake, now + _LOOK_AGAIN_NS)
            return is_done
        until = state.wait_for_windows(queue)
        if until is not None:
            queue.wake = until
            return True
        state.drop(queue.head, decision.earliest_finish)
        return not queue

    def _elsewhere(
        self, queue: RowQueue, now: Nanoseconds
    ) -> DispatchDecision | WaitDecision | None:
        """Decides for rows that should avoid agents; None if they need these to be in time."""
        avoid = queue.head.avoid
        if not avoid:
            return None
        with self._state.routes.avoiding(queue.model, avoid) as detour:
            if not detour.routes:
                return None
            decision = decide(queue, detour.routes, self._book, self._config, now)
        return None if isinstance(decision, DropDecision) else decision

    def _send(
        self, queue: RowQueue, decision: DispatchDecision, batch_id: BatchId, steps: list[PathHop]
    ) -> None:
        state = self._state
        finish = decision.path.finish_ns
        rows, units = queue.take(decision.route, decision.size, finish)
        if not any(part.attempt for part in rows):
            state.first_dispatched()
        slices = []
        batch_row = 0
        for part in rows:
            slices.append(BatchSlice(part.request.request_id, part.first, part.count, batch_row))
            batch_row += part.count
        route, at = decision.route, decision.path.rows - 1
        windows = iter(self._book.start_windows(batch_id))
        planned: list[PlannedHop] = []
        for step, partition, leg in zip(steps, route.partitions, route.chain.legs, strict=True):
            transfer_earliest = next(windows).earliest_ns if planned and step.transfer_ns else 0
            earliest, behind = next(windows)
            hop = PlannedHop(
                step.member.agent,
                partition,
                step.start,
                step.compute_ns,
                step.transfer_start,
                step.transfer_ns,
                step.compute_ns - leg.compute_ns[at],
                earliest,
                behind,
                transfer_earliest,
            )
            planned.append(hop)
        hops = tuple(planned)
        agents = tuple([hop.agent for hop in hops])
        state.tracker.add_batch(Batch(batch_id, rows, agents, route.partitions))
        state.commands.append(
            DispatchBatch(batch_id, batch_row, tuple(slices), hops, finish, units)
        )
        state.counters["dispatched_batches"] += 1
        state.counters["dispatched_rows"] += batch_row
        if route.idle:
            route.spend(steps, state.now)
        if len(state.breakers):
            for hop in hops:
                state.breakers.given(hop.agent, hop.partition, state.now)
            state.look_around()  # if that was a probe, others go elsewhere
        if route.is_shared:
            state.counters["shared_batches"] += 1
        elif self._may_grant(queue, rows, batch_id):
            self._grant(queue.model, route, rows[0].request, steps)
        for other in route.owners or state.routes.contenders(queue.model):
            if other in state.queues:  # its last safe moment may be earlier now
                state.dirty[other] = None

    # Windows

    def _may_grant(self, queue: RowQueue, rows: list[RowRange], sent: BatchId) -> bool:
        """Returns True if the gateway of a batch that was just sent may have a window.

        It may if nobody else wants the path: no row waits, the requests are of one gateway and not
        urgent, and if there are other paths, no other batch of the model is under way.
        """
        state, request = self._state, rows[0].request
        if (
            not state.windows.longest_ns
            or queue
            or not request.takes_windows
            or request.texts is not None
            or len(state.breakers)
        ):
            return False
        gateway = request.request_id.gateway
        for part in rows:
            its = part.request
            if part.attempt or its.priority or its.request_id.gateway != gateway:
                return False
        if not state.windows.is_free(queue.model, state.routes.contenders(queue.model), state.now):
            return False
        if state.routes.has_only_path(queue.model):
            return True
        return not any(
            batch.rows and batch.rows[0].request.model == queue.model and not batch.final
            for batch in state.tracker.batches.values()
            if batch.batch_id != sent
        )

    def _grant(self, model: ModelKey, route: Route, request: Request, steps: list[PathHop]) -> None:
        state, window = self._state, BatchId(self._next_batch)
        is_only = state.routes.has_only_path(model)
        if state.windows.grant(request, route, steps, window, is_only, state.now):
            self._next_batch += WINDOW_IDS
