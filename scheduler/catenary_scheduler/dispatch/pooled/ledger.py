"""State of the pooled dispatcher, and the operations on it.

Every rule here serves one promise: a request that was admitted is answered exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.book import Book
from catenary_scheduler.book.book import agents_of
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.breaker import CircuitBreakers
from catenary_scheduler.dispatch.events import CancelBatch, Command, Reject
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.dispatch.pooled.config import PooledConfig
from catenary_scheduler.dispatch.pooled.routes import RouteTable
from catenary_scheduler.dispatch.pooled.row_queue import RowQueue
from catenary_scheduler.dispatch.pooled.tracking import Batch, Request, RequestTracker, RowRange
from catenary_scheduler.dispatch.pooled.windows import WindowGranter
from catenary_services.domain.ids import AgentId, BatchId, ModelKey, Nanoseconds
from catenary_services.domain.plan import Agent, Plan
from catenary_services.errors import NoActivePlan, PartitionLost

_COUNTERS = (
    "arrived_requests",
    "completed_requests",
    "cancelled_requests",
    "rejected_requests",
    "decisions",
    "dispatched_batches",
    "dispatched_rows",
    "shared_batches",
    "retried_rows",
    "overdue_batches",
    "withheld_retries",
    "failed_batches",
    "failed_requests",
    "undelivered_requests",
    "corrections",
    "displaced_batches",
    "late_corrections",
    "drift_ns_sum",
    "drift_ns_max",
)


class PooledLedger:
    """State of the pooled dispatcher.

    `commands` collects the commands of the event in hand; `dirty` the models whose queue deserves a
    look; `now` is the moment of that event.
    """

    def __init__(
        self, config: PooledConfig, book: Book, availability: Availability, times: BookedTimes
    ) -> None:
        self.now: Nanoseconds = 0
        self.commands: list[Command] = []
        self.dirty: dict[ModelKey, None] = {}
        self.queues: dict[ModelKey, RowQueue] = {}
        self.tracker = RequestTracker()
        self.routes = RouteTable(book, availability, times, config.protected_share)
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.config = config
        self.book = book
        self.availability = availability
        self.breakers = CircuitBreakers(availability, config.breaker)
        waits = config.max_linger_ns is None  # for full batches, which windows are not for
        longest_ns = 0 if waits else config.longest_window_ns
        self.windows = WindowGranter(book, longest_ns, config.window_share)
        self.availability_seen = availability.version
        """Version of the availability from which the routes were made."""
        self.times = times
        self.times_seen = times.version
        self.plan: Plan | None = None
        self.agents: dict[AgentId, Agent] = {}
        self.misplaced = False
        """True if there may be queues of models that no plan serves."""
        self._sequence = 0
        self._late_retries = float(config.late_retries)

    def first_dispatched(self) -> None:
        """Notes the first dispatch of a batch, which adds to the budget of late retries."""
        most = float(self.config.late_retries)
        self._late_retries = min(most, self._late_retries + self.config.late_retry_share)

    def may_retry_late(self) -> bool:
        """Takes one retry of a late batch from the budget; False if that is used up."""
        if self._late_retries < 1.0:
            self.counters["withheld_retries"] += 1
            return False
        self._late_retries -= 1.0
        return True

    def overdue_at(self, finish: Nanoseconds) -> Nanoseconds:
        """Returns when a batch that should finish at `finish` counts as lost."""
        return finish + max(self.config.overdue_grace_ns, finish - self.now)

    def forget_idle_queues(self) -> None:
        """Drops the queues of models that have neither rows nor a plan."""
        if self.misplaced:
            for model in [m for m, q in self.queues.items() if not q and not self.routes.serves(m)]:
                del self.queues[model]
            self.misplaced = any(not self.routes.serves(model) for model in self.queues)

    def enqueue(self, rows: RowRange) -> None:
        """Puts rows into their queue; a range without rows is ignored."""
        if rows.count <= 0:
            return
        model = rows.request.model
        queue = self.queues.get(model)
        if queue is None:
            queue = self.queues[model] = RowQueue(model)
            self.misplaced = self.misplaced or not self.routes.serves(model)
        queue.push(rows)
        self.dirty[model] = None

    def reject(
        self,
        request: Request,
        reason: str,
        message: str,
        *,
        retry_after_ns: Nanoseconds | None = None,
        earliest_finish_ns: Nanoseconds | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        """Answers a request with an error, unless it was answered already."""
        if self.tracker.requests.get(request.request_id) is not request:
            return
        self.counters["rejected_requests"] += 1
        self.commands.append(
            Reject(
                request.request_id,
                reason,
                message,
                retry_after_ns,
                earliest_finish_ns,
                details or {},
            )
        )
        self.forget(request)

    def unserved(self, request: Request) -> None:
        """Rejects a request whose model no plan serves any more."""
        self.reject(
            request,
            NoActivePlan.reason,
            f"no plan serves {request.model} any more",
            retry_after_ns=self.config.retry_after_ns,
        )

    def forget(self, request: Request, *, delivered: bool = False) -> None:
        """Stops following a request; `delivered` if the gateway has all of it."""
        self.tracker.requests.pop(request.request_id, None)
        if request.queued_rows:
            self.queues[request.model].remove(request)
        for batch in list(request.batches.values()):
            rows = self.tracker.detach(request, batch)
            if delivered and not any(part.attempt for part in rows):
                batch.final = batch.final or not batch.rows  # it went all the way
            self.drop_if_empty(batch)

    def drop_if_empty(self, batch: Batch) -> None:
        """Ends a batch for which no request waits."""
        if batch.rows:
            return
        self.cancel_on_agents(batch)
        self.tracker.remove_batch(batch)
        self.book.release(batch.batch_id)

    def cancel_on_agents(self, batch: Batch) -> None:
        """Orders the agents that a batch has not passed to forget it.

        This includes the agent to blame for a failure: the report may come from a gateway, or from
        the agent before, and rows may be at the blamed agent, or still arrive.
        """
        if batch.final:
            return
        hops = batch.agents[max(batch.reported, 0) :] or self._booked_on(batch.batch_id)
        agents = tuple(agent for agent in dict.fromkeys(hops) if agent in self.agents)
        if agents:
            self.commands.append(CancelBatch(batch.batch_id, agents))

    def _booked_on(self, batch: BatchId) -> Iterable[AgentId]:
        """Returns the agents that may have another scheduler's batch; all if the book is silent."""
        return agents_of(self.book.ahead(batch)) or self.agents

    def retry(self, batch: Batch, avoid: AgentId | None, *, lost: bool = True) -> None:
        """Ends a batch and puts its rows back.

        `lost` is False if it is merely late or was not sent.

        The rows go to other agents than `avoid`, if they can.
        """
        self.cancel_on_agents(batch)
        rows = self.tracker.remove_batch(batch)
        self.book.release(batch.batch_id)
        if avoid is not None:
            for part in rows:
                part.avoid |= {avoid}
        self.again(rows, lost=lost)

    def again(self, rows: list[RowRange], *, lost: bool = True) -> None:
        """Puts rows back into the queue; those that were `lost`, as often as is allowed.

        Late rows do not count as lost: it takes a while until an agent that went silent is known to
        be lost, and all attempts before may have gone to it.
        """
        for part in rows:
            request = part.request
            part.attempt += 1
            part.lost += lost
            if self.tracker.requests.get(request.request_id) is not request:
                continue  # answered a moment ago, for other rows
            if part.lost >= self.config.max_attempts:
                self.reject(request, PartitionLost.reason, f"lost {part.lost} times")
            elif self.plan is not None and not self.routes.serves(request.model):
                self.unserved(request)
            else:
                self.counters["retried_rows"] += part.count
                self.enqueue(part)
