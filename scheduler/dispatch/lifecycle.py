"""From arrival to answer: what each event does to requests, batches and bookings.

The order of every rule here serves one promise: a request that was admitted is answered once.
"""

from __future__ import annotations

from scheduler.book import Book
from scheduler.book.book import gpu_of
from scheduler.dispatch.config import PooledConfig
from scheduler.dispatch.events import (
    AdoptedRows,
    AgentJoined,
    AgentLost,
    BatchFailed,
    CancelBatch,
    Command,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    StageReported,
)
from scheduler.dispatch.queue import ModelQueue
from scheduler.dispatch.routes import RouteTable
from scheduler.dispatch.tracking import Batch, Request, Rows, Tracker
from services.domain.ids import AgentId, ModelKey, Nanoseconds
from services.domain.plan import Agent, Plan
from services.errors import (
    DeadlineExceeded,
    InvalidInput,
    NoActivePlan,
    Overloaded,
    PartitionLost,
    SloUnattainable,
    Unavailable,
)

_COUNTERS = (
    "arrived_requests", "completed_requests", "cancelled_requests", "rejected_requests",
    "decisions",
    "dispatched_batches", "dispatched_rows", "retried_rows", "overdue_batches", "failed_batches",
    "undelivered_requests", "corrections", "displaced_batches", "late_corrections",
    "drift_ns_sum", "drift_ns_max",
)  # fmt: skip


class Lifecycle:
    """State of the pooled dispatcher and one small method per event.

    `commands` collects what the shell is to do; `dirty` the models whose queue deserves a look.
    """

    def __init__(self, config: PooledConfig, book: Book) -> None:
        self.now: Nanoseconds = 0
        self.commands: list[Command] = []
        self.dirty: dict[ModelKey, None] = {}
        self.queues: dict[ModelKey, ModelQueue] = {}
        self.tracker = Tracker()
        self.routes = RouteTable(book)
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self._config = config
        self._book = book
        self._plan: Plan | None = None
        self._agents: dict[AgentId, Agent] = {}
        self._sequence = 0

    # Requests

    def arrived(self, event: RequestArrived) -> None:
        """Admits a request, or answers it at once."""
        known = self.tracker.requests.get(event.request)
        if known is not None:
            self._resubmitted(known, event)
            return
        self.counters["arrived_requests"] += 1
        refusal = self._refusal(event)
        if refusal is not None:
            self.counters["rejected_requests"] += 1
            self.commands.append(refusal)
            return
        self._sequence += 1
        request = Request(event, self.now, self._sequence)
        self.tracker.requests[event.request] = request
        self.tracker.set_timer(request, event.deadline_ns + self._config.deadline_grace_ns)
        row = 0
        for adopted in sorted(event.in_flight, key=lambda part: part.request_row):
            first = max(row, adopted.request_row)
            end = min(event.rows, adopted.request_row + adopted.rows)
            if first < end:
                self._enqueue(Rows(request, row, first - row))
                self._adopt(Rows(request, first, end - first), adopted)
                row = end
        self._enqueue(Rows(request, row, event.rows - row))

    def completed(self, event: RequestCompleted) -> None:
        """The gateway has every row."""
        request = self.tracker.requests.get(event.request)
        if request is not None:
            self.counters["completed_requests"] += 1
            self._forget(request, delivered=True)

    def cancelled(self, event: RequestCancelled) -> None:
        """Nobody waits for it any more."""
        request = self.tracker.requests.get(event.request)
        if request is not None:
            self.counters["cancelled_requests"] += 1
            self._forget(request)

    def drop(self, head: Rows, earliest_finish: Nanoseconds) -> None:
        """Algorithm 1, line 16: no batch with these rows can meet the deadline."""
        request = head.request
        late = earliest_finish - request.deadline
        if head.attempt:
            self._reject(
                request, PartitionLost.reason, "the work was lost and cannot be redone in time"
            )
            return
        hopeless = self._never_fits(request)
        self._reject(
            request,
            SloUnattainable.reason,
            f"would finish {late / 1e6:.3f} ms after its deadline",
            retry_after_ns=None if hopeless else max(1, late),
            earliest_finish_ns=earliest_finish,
        )

    def without_route(self, queue: ModelQueue) -> bool:
        """No pipeline of this model is whole: waits as long as that can help.

        Returns:
            True if the queue waits now, False if its head was answered.
        """
        request = queue.head.request
        until = request.deadline - self._config.safety_margin_ns
        if until > self.now:
            queue.wake = until
            return True
        if self.routes.serves(queue.model):
            reason, message = Unavailable.reason, "a stage of every pipeline is without an agent"
        else:
            reason, message = NoActivePlan.reason, "no plan is active"
        self._reject(request, reason, message, retry_after_ns=self._config.retry_after_ns)
        return not queue

    # Batches

    def stage_reported(self, event: StageReported) -> None:
        """Mends the book; after the last hop nothing of the batch is booked any more."""
        last = self._book.last_position(event.batch)
        if event.transfer_start_ns is not None and event.transfer_end_ns is not None:
            self._correct(event, event.transfer_start_ns, event.transfer_end_ns, transfer=True)
        self._correct(event, event.compute_start_ns, event.compute_end_ns, transfer=False)
        batch = self.tracker.batches.get(event.batch)
        if batch is not None:
            batch.reported = max(batch.reported, event.position)
            if batch.agents:
                last = len(batch.agents) - 1
        if last is not None and event.position >= last:
            self._book.release(event.batch)
            if batch is not None and not batch.final:
                batch.final = True
                self._await_delivery(batch.requests())
        else:
            finish = self._book.finish(event.batch) or self.now
            self._book.confirm(event.batch, self.overdue_at(finish))

    def batch_failed(self, event: BatchFailed) -> None:
        """Rows go back to the queue, or their requests are answered with the failure."""
        batch = self.tracker.batches.get(event.batch)
        if batch is None:
            self._book.release(event.batch)
            return
        self.counters["failed_batches"] += 1
        if event.retryable:
            self._retry(batch, event.agent)
            return
        self._cancel(batch, event.agent)
        requests = batch.requests()
        self.tracker.remove_batch(batch)
        self._book.release(batch.batch_id)
        for request in requests:
            self._reject(request, event.reason, event.message)

    def on_time(self) -> None:
        """Looks after everything whose time has come."""
        for batch_id in self._book.expire(self.now):
            batch = self.tracker.batches.get(batch_id)
            if batch is not None:
                self.counters["overdue_batches"] += 1
                self._retry(batch, None)
        for request in self.tracker.due(self.now):
            last_moment = request.deadline + self._config.deadline_grace_ns
            if self.now >= last_moment:
                self._reject(
                    request,
                    DeadlineExceeded.reason,
                    "no result before the deadline",
                    details={"stage": "queue" if request.queued_rows else "in flight"},
                )
            elif request.computed:
                self.counters["undelivered_requests"] += 1
                self._redo(request)
            else:
                self.tracker.set_timer(request, last_moment)

    # Cluster

    def agent_joined(self, event: AgentJoined) -> None:
        """Its pools have one more member."""
        self._agents[event.agent.agent_id] = event.agent
        self._rebuild()

    def agent_lost(self, event: AgentLost) -> None:
        """What it held or was to hold is dispatched again."""
        self._agents.pop(event.agent, None)
        adopted = self._book.pending_on(gpu_of(event.agent))
        for batch in list(self.tracker.batches.values()):
            if batch.needs(event.agent) or (not batch.agents and batch.batch_id in adopted):
                self._retry(batch, event.agent)
        for batch_id in adopted:
            if batch_id not in self.tracker.batches:
                self._book.release(batch_id)
        self._rebuild()

    def plan_activated(self, event: PlanActivated) -> None:
        """Batches in flight finish by the old plan; what waits is routed by the new one."""
        self._plan = event.plan
        self._rebuild()
        for queue in list(self.queues.values()):
            if not self.routes.serves(queue.model):
                for request in queue.requests():
                    self._unserved(request)

    # Inside

    def overdue_at(self, finish: Nanoseconds) -> Nanoseconds:
        """Returns when a batch that should finish at `finish` counts as lost."""
        return finish + max(self._config.overdue_grace_ns, finish - self.now)

    def forget_idle_queues(self) -> None:
        """Keeps queues only for models with rows or with a plan."""
        if len(self.queues) > 1:
            for model in [m for m, q in self.queues.items() if not q and not self.routes.serves(m)]:
                del self.queues[model]

    def _refusal(self, event: RequestArrived) -> Reject | None:
        if event.rows < 1:
            return Reject(
                event.request, InvalidInput.reason, "rows: must be at least 1",
                details={"field": "rows"},
            )  # fmt: skip
        if event.in_flight:  # admitted before, by another scheduler
            return None
        config = self._config
        if self._plan is not None and not self.routes.serves(event.model):
            return Reject(
                event.request,
                NoActivePlan.reason,
                f"no plan serves {event.model}",
                retry_after_ns=config.retry_after_ns,
            )
        if event.deadline_ns <= self.now:
            return Reject(
                event.request, DeadlineExceeded.reason, "the deadline is over already",
                details={"stage": "arrival"},
            )  # fmt: skip
        queue = self.queues.get(event.model)
        queued = queue.rows if queue is not None else 0
        if (
            queued + event.rows > config.max_queued_rows
            or len(self.tracker.requests) >= config.max_requests
        ):
            return Reject(
                event.request,
                Overloaded.reason,
                f"{queued} rows of {event.model} wait already",
                retry_after_ns=config.retry_after_ns,
            )
        return None

    def _resubmitted(self, request: Request, event: RequestArrived) -> None:
        """A gateway came back: it never heard of batches it does not name."""
        heard_of = {part.batch for part in event.in_flight}
        for batch in list(request.batches.values()):
            if batch.batch_id not in heard_of and not batch.final:
                rows = self.tracker.detach(request, batch)
                self._drop_if_empty(batch)
                for part in rows:
                    self._enqueue(part)

    def _adopt(self, rows: Rows, adopted: AdoptedRows) -> None:
        batch = self.tracker.batches.get(adopted.batch)
        if batch is not None:
            self.tracker.add_rows(batch, rows)
            return
        overdue = self.overdue_at(max(adopted.expected_ns, self.now))
        if adopted.batch in self._book:
            self._book.confirm(adopted.batch, overdue)
        else:
            self._book.reserve(adopted.batch, (), overdue)
        self.tracker.add_batch(Batch(adopted.batch, [rows], ()))

    def _enqueue(self, rows: Rows) -> None:
        if rows.count <= 0:
            return
        model = rows.request.model
        queue = self.queues.get(model)
        if queue is None:
            queue = self.queues[model] = ModelQueue(model)
        queue.push(rows)
        self.dirty[model] = None

    def _reject(
        self,
        request: Request,
        reason: str,
        message: str,
        *,
        retry_after_ns: Nanoseconds | None = None,
        earliest_finish_ns: Nanoseconds | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        if self.tracker.requests.get(request.request_id) is not request:
            return
        self.counters["rejected_requests"] += 1
        self.commands.append(
            Reject(
                request.request_id, reason, message, retry_after_ns, earliest_finish_ns,
                details or {},
            )
        )  # fmt: skip
        self._forget(request)

    def _unserved(self, request: Request) -> None:
        self._reject(
            request,
            NoActivePlan.reason,
            f"no plan serves {request.model} any more",
            retry_after_ns=self._config.retry_after_ns,
        )

    def _forget(self, request: Request, *, delivered: bool = False) -> None:
        self.tracker.requests.pop(request.request_id, None)
        if request.queued_rows:
            self.queues[request.model].remove(request)
        for batch in list(request.batches.values()):
            rows = self.tracker.detach(request, batch)
            if delivered and not any(part.attempt for part in rows):
                batch.final = batch.final or not batch.rows  # it went all the way: no cancelling
            self._drop_if_empty(batch)

    def _drop_if_empty(self, batch: Batch) -> None:
        if batch.rows:
            return
        self._cancel(batch, None)
        self.tracker.remove_batch(batch)
        self._book.release(batch.batch_id)

    def _cancel(self, batch: Batch, without: AgentId | None) -> None:
        """Tells the agents a batch has not passed that it is off."""
        if batch.final:
            return
        hops = dict.fromkeys(batch.agents[max(batch.reported, 0) :])
        agents = tuple(agent for agent in hops if agent != without and agent in self._agents)
        if agents:
            self.commands.append(CancelBatch(batch.batch_id, agents))

    def _retry(self, batch: Batch, failed: AgentId | None) -> None:
        self._cancel(batch, failed)
        rows = self.tracker.remove_batch(batch)
        self._book.release(batch.batch_id)
        self._again(rows)

    def _redo(self, request: Request) -> None:
        """All was computed, nothing arrived: the results were lost on their way."""
        rows = []
        for batch in list(request.batches.values()):
            rows += self.tracker.detach(request, batch)
            self._drop_if_empty(batch)
        self.tracker.set_timer(request, request.deadline + self._config.deadline_grace_ns)
        self._again(rows)

    def _again(self, rows: list[Rows]) -> None:
        for part in rows:
            request = part.request
            part.attempt += 1
            if self.tracker.requests.get(request.request_id) is not request:
                continue  # answered a moment ago, for other rows
            if part.attempt >= self._config.max_attempts:
                self._reject(request, PartitionLost.reason, f"lost {part.attempt} times")
            elif self._plan is not None and not self.routes.serves(request.model):
                self._unserved(request)
            else:
                self.counters["retried_rows"] += part.count
                self._enqueue(part)

    def _await_delivery(self, requests: list[Request]) -> None:
        for request in requests:
            if request.computed:
                hard = request.deadline + self._config.deadline_grace_ns
                soft = self.now + self._config.delivery_grace_ns
                self.tracker.set_timer(request, min(hard, soft))

    def _correct(
        self, event: StageReported, start: Nanoseconds, end: Nanoseconds, *, transfer: bool
    ) -> None:
        correction = self._book.correct(event.batch, event.position, start, end, transfer=transfer)
        if correction is None:
            return
        counters = self.counters
        counters["displaced_batches"] += len(correction.displaced)
        if not transfer:
            drift = abs(correction.drift_ns)
            counters["corrections"] += 1
            counters["late_corrections"] += correction.drift_ns > 0
            counters["drift_ns_sum"] += drift
            counters["drift_ns_max"] = max(counters["drift_ns_max"], drift)

    def _never_fits(self, request: Request) -> bool:
        """True if the request's whole budget is less than the work of a single row."""
        routes = self.routes.of(request.model)
        return request.arrived + min(route.work[0] for route in routes) > request.deadline

    def _rebuild(self) -> None:
        self.routes.rebuild(self._plan, self._agents)
        self.dirty.update(dict.fromkeys(self.queues))
