"""What the dispatcher knows, and the few things that may be done to it.

Every rule here serves one promise: a request that was admitted is answered exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.book import Book
from catenary_scheduler.book.book import agents_of
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.breaker import Breakers
from catenary_scheduler.dispatch.events import CancelBatch, Command, Reject
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.dispatch.pooled.config import PooledConfig
from catenary_scheduler.dispatch.pooled.queue import ModelQueue
from catenary_scheduler.dispatch.pooled.routes import RouteTable
from catenary_scheduler.dispatch.pooled.tracking import Batch, Request, Rows, Tracker
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


class Ledger:
    """State of the pooled dispatcher.

    `commands` collects what the shell is to do; `dirty` the models whose queue deserves a look;
    `now` is the moment of the event that is being handled.
    """

    def __init__(
        self, config: PooledConfig, book: Book, availability: Availability, times: BookedTimes
    ) -> None:
        self.now: Nanoseconds = 0
        self.commands: list[Command] = []
        self.dirty: dict[ModelKey, None] = {}
        self.queues: dict[ModelKey, ModelQueue] = {}
        self.tracker = Tracker()
        self.routes = RouteTable(book, availability, times)
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.config = config
        self.book = book
        self.availability = availability
        self.breakers = Breakers(availability, config.breaker)
        self.availability_seen = availability.version
        """Of this version are the routes."""
        self.times = times
        self.times_seen = times.version
        self.plan: Plan | None = None
        self.agents: dict[AgentId, Agent] = {}
        self.strays = False
        """There may be queues of models that no plan serves."""
        self._sequence = 0
        self._late_retries = float(config.late_retries)

    def first_dispatched(self) -> None:
        """A batch went out for the first time: it pays for a part of a late retry."""
        most = float(self.config.late_retries)
        self._late_retries = min(most, self._late_retries + self.config.late_retry_share)

    def may_retry_late(self) -> bool:
        """True if a batch that is merely late may go out again; that is paid then."""
        if self._late_retries < 1.0:
            self.counters["withheld_retries"] += 1
            return False
        self._late_retries -= 1.0
        return True

    def overdue_at(self, finish: Nanoseconds) -> Nanoseconds:
        """Returns when a batch that should finish at `finish` counts as lost."""
        return finish + max(self.config.overdue_grace_ns, finish - self.now)

    def forget_idle_queues(self) -> None:
        """Keeps queues only for models with rows or with a plan."""
        if self.strays:
            for model in [m for m, q in self.queues.items() if not q and not self.routes.serves(m)]:
                del self.queues[model]
            self.strays = any(not self.routes.serves(model) for model in self.queues)

    def enqueue(self, rows: Rows) -> None:
        """Puts rows into their queue; none is fine."""
        if rows.count <= 0:
            return
        model = rows.request.model
        queue = self.queues.get(model)
        if queue is None:
            queue = self.queues[model] = ModelQueue(model)
            self.strays = self.strays or not self.routes.serves(model)
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
        """Answers a request whose model no plan serves any more."""
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
                batch.final = batch.final or not batch.rows  # it went all the way: no cancelling
            self.drop_if_empty(batch)

    def drop_if_empty(self, batch: Batch) -> None:
        """Ends a batch nobody waits for."""
        if batch.rows:
            return
        self.cancel_on_agents(batch)
        self.tracker.remove_batch(batch)
        self.book.release(batch.batch_id)

    def cancel_on_agents(self, batch: Batch) -> None:
        """Tells the agents a batch has not passed that it is off.

        Also the one that is to blame for a failure: who says so may be a gateway, or the agent
        before, and the rows of others may be there, or come yet.
        """
        if batch.final:
            return
        hops = batch.agents[max(batch.reported, 0) :] or self._booked_on(batch.batch_id)
        agents = tuple(agent for agent in dict.fromkeys(hops) if agent in self.agents)
        if agents:
            self.commands.append(CancelBatch(batch.batch_id, agents))

    def _booked_on(self, batch: BatchId) -> Iterable[AgentId]:
        """Returns who may have a batch of another scheduler: everyone, if the book does not say."""
        return agents_of(self.book.ahead(batch)) or self.agents

    def retry(self, batch: Batch, avoid: AgentId | None, *, lost: bool = True) -> None:
        """Ends a batch that was `lost`, is only late or not sent, and puts its rows back.

        They go elsewhere than to `avoid`, if they can.
        """
        self.cancel_on_agents(batch)
        rows = self.tracker.remove_batch(batch)
        self.book.release(batch.batch_id)
        if avoid is not None:
            for part in rows:
                part.avoid |= {avoid}
        self.again(rows, lost=lost)

    def again(self, rows: list[Rows], *, lost: bool = True) -> None:
        """Puts rows back into the queue; those that were lost, as often as is allowed.

        Being late does not count as being lost: an agent that went silent is known to be lost
        only later, and all attempts before that may have gone to it.
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
