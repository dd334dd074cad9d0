"""Records of every open request and every batch in flight."""

from __future__ import annotations

from heapq import heappop, heappush

from catenary_scheduler.dispatch.events import RequestArrived
from catenary_services.domain.ids import AgentId, BatchId, Nanoseconds, PartitionKey, RequestId


class Request:
    """An admitted request, until it is answered.

    Invariant: every row is in the queue (`queued_rows` of them) or in one of `batches`.
    """

    __slots__ = (
        "arrived",
        "batches",
        "deadline",
        "model",
        "priority",
        "queued_rows",
        "request_id",
        "rows",
        "sequence",
        "takes_windows",
        "texts",
        "timer",
    )

    def __init__(self, event: RequestArrived, arrived: Nanoseconds, sequence: int) -> None:
        self.request_id = event.request
        self.model = event.model
        self.rows = event.rows
        self.texts = event.texts
        self.takes_windows = event.takes_windows
        self.deadline = event.deadline_ns
        self.priority = event.priority
        self.arrived = arrived
        self.sequence = sequence
        self.queued_rows = 0
        self.batches: dict[BatchId, Batch] = {}
        self.timer: Nanoseconds = 0
        """Moment at which it must be looked at even without an event."""

    @property
    def computed(self) -> bool:
        """True if every row went through its last hop, and only the gateway has yet to confirm."""
        return not self.queued_rows and all(batch.final for batch in self.batches.values())


class RowRange:
    """Rows `[first, first + count)` of a request, dispatched `attempt` times before.

    `lost` of these attempts were lost; the others were merely late, and given up.
    """

    __slots__ = ("attempt", "avoid", "count", "failures", "first", "lost", "request")

    def __init__(
        self, request: Request, first: int, count: int, attempt: int = 0, lost: int = 0
    ) -> None:
        self.request = request
        self.first = first
        self.count = count
        self.attempt = attempt
        self.lost = lost
        self.avoid: frozenset[AgentId] = _NOBODY
        """Agents on which the rows failed or were overdue; they are avoided where there are
        others."""
        self.failures: tuple[tuple[AgentId, BatchId], ...] = ()
        """Devices that failed to compute the rows, each with the batch."""

    def part(self, count: int) -> RowRange:
        """Returns the first `count` of these rows."""
        taken = RowRange(self.request, self.first, count, self.attempt, self.lost)
        taken.avoid, taken.failures = self.avoid, self.failures
        return taken


_NOBODY: frozenset[AgentId] = frozenset()


class Batch:
    """A batch in flight; `agents` is empty for one that an earlier scheduler dispatched."""

    __slots__ = ("agents", "batch_id", "final", "partitions", "reported", "rows")

    def __init__(
        self,
        batch_id: BatchId,
        rows: list[RowRange],
        agents: tuple[AgentId, ...],
        partitions: tuple[PartitionKey, ...] = (),
    ) -> None:
        self.batch_id = batch_id
        self.rows = rows
        """Rows of requests that are still open."""
        self.agents = agents
        self.partitions = partitions
        """The partition that each of `agents` computes."""
        self.reported = -1
        """Position of the last hop that reported; -1 before any did."""
        self.final = False
        """True if the last hop reported, so that nothing of the batch is booked any more."""

    def needs(self, agent: AgentId) -> bool:
        """True if the batch is, may be, or will be on `agent`."""
        return agent in self.agents[max(self.reported, 0) :]

    def holder(self) -> AgentId | None:
        """Returns the agent that has it now, or is about to; None if that is not known."""
        following = self.reported + 1
        return self.agents[following] if following < len(self.agents) else None

    def computed_by(self, agent: AgentId) -> PartitionKey | None:
        """Returns the partition that an agent computes of it, if that is known."""
        if agent not in self.agents or len(self.partitions) != len(self.agents):
            return None
        return self.partitions[self.agents.index(agent)]

    def requests(self) -> list[Request]:
        """Returns the open requests in it, each once."""
        return list(dict.fromkeys(rows.request for rows in self.rows))


class RequestTracker:
    """Open requests, batches in flight, and the requests' timers."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.batches: dict[BatchId, Batch] = {}
        self._timers: list[tuple[Nanoseconds, int, Request]] = []
        self._timers_set = 0

    def add_batch(self, batch: Batch) -> None:
        self.batches[batch.batch_id] = batch
        for rows in batch.rows:
            rows.request.batches[batch.batch_id] = batch

    def add_rows(self, batch: Batch, rows: RowRange) -> None:
        """Adds rows to a batch that is followed already."""
        batch.rows.append(rows)
        rows.request.batches[batch.batch_id] = batch

    def remove_batch(self, batch: Batch) -> list[RowRange]:
        """Stops following a batch; returns its rows of open requests."""
        self.batches.pop(batch.batch_id, None)
        for rows in batch.rows:
            rows.request.batches.pop(batch.batch_id, None)
        rows_left, batch.rows = batch.rows, []
        return rows_left

    def detach(self, request: Request, batch: Batch) -> list[RowRange]:
        """Takes a request out of a batch, which may be empty then; returns its rows."""
        request.batches.pop(batch.batch_id, None)
        taken = [rows for rows in batch.rows if rows.request is request]
        batch.rows = [rows for rows in batch.rows if rows.request is not request]
        return taken

    def set_timer(self, request: Request, moment: Nanoseconds) -> None:
        """Makes `due` return this request at `moment`, and not before."""
        request.timer = moment
        self._timers_set += 1
        heappush(self._timers, (moment, self._timers_set, request))

    def next_timer(self) -> Nanoseconds | None:
        """Returns the next moment at which `due` has something to return; None: there is none."""
        timers = self._timers
        while timers:
            moment, _, request = timers[0]
            if request.timer == moment and self.requests.get(request.request_id) is request:
                return moment
            heappop(timers)
        return None

    def due(self, now: Nanoseconds) -> list[Request]:
        """Removes and returns the requests whose timer has expired."""
        found = []
        while (moment := self.next_timer()) is not None and moment <= now:
            request = heappop(self._timers)[2]
            request.timer = -1
            found.append(request)
        return found
