"""The reactive dispatcher's view of pools: expected ends of work, and queues in front of them.

Nothing here looks beyond one stage, and links are taken to be free: that is what makes it reactive.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    RequestId,
)
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline


class Row:
    """One row of a request, which goes through the stages by itself."""

    __slots__ = ("at", "attempt", "key", "model", "number", "open", "queued", "request")

    def __init__(
        self,
        request: RequestId,
        number: int,
        model: ModelKey,
        key: tuple[int, Nanoseconds, int, int],
    ) -> None:
        self.request = request
        self.number = number
        """Position of the row in its request."""
        self.model = model
        self.key = key
        """Sort key in queues: (-priority, deadline, order of arrival, row)."""
        self.at: AgentId | None = None
        """Agent that holds the row's feature map; None: the gateway holds its input."""
        self.attempt = 0
        self.open = True
        """False once the row's request is answered."""
        self.queued = False

    @property
    def deadline(self) -> Nanoseconds:
        """Deadline of the row's request, in nanoseconds."""
        return self.key[1]


class Vgpu:
    """An agent with the time at which its work is expected to be done."""

    __slots__ = ("agent", "bytes_per_second", "free_at", "given", "stages")

    def __init__(self, agent: Agent) -> None:
        self.agent = agent.agent_id
        self.bytes_per_second = max(1, agent.link_bytes_per_second)
        self.free_at: Nanoseconds = 0
        self.given: list[Given] = []
        """Batches that the agent has not reported yet, in order of dispatch."""
        self.stages: list[tuple[Stage, int]] = []
        """Pools that the agent is in, each with its index there."""

    def give(self, batch: BatchId, ready: Nanoseconds, duration: Nanoseconds) -> Nanoseconds:
        """Notes a batch, and returns when it is expected to end."""
        self.given.append(Given(batch, ready, duration))
        self._free(max(ready, self.free_at) + duration)
        return self.free_at

    def done(self, batch: BatchId, end: Nanoseconds) -> None:
        """Notes when a batch really ended; the batches behind it begin then, at the earliest."""
        self.given = [other for other in self.given if other.batch != batch]
        for other in self.given:
            end = max(end, other.ready) + other.duration
        self._free(end)

    def _free(self, moment: Nanoseconds) -> None:
        if moment != self.free_at:
            self.free_at = moment
            for stage, index in self.stages:
                heappush(stage.order, (moment, index))


class Given(NamedTuple):
    """A batch that an agent has not reported yet."""

    batch: BatchId
    ready: Nanoseconds
    """Time at which its data should be there if the links are free."""
    duration: Nanoseconds


class Stage:
    """A pool with the costs of a batch there and the planned duration of the later stages."""

    __slots__ = (
        "batch_size",
        "compute_ns",
        "following",
        "later_ns",
        "members",
        "order",
        "partition",
        "transfer_ns",
    )

    def __init__(
        self,
        partition: PartitionKey,
        members: list[Vgpu],
        compute_ns: tuple[Nanoseconds, ...],
        transfer_ns: tuple[Nanoseconds, ...],
    ) -> None:
        self.partition = partition
        self.members = members
        self.compute_ns = compute_ns
        """Duration of a batch by its size, in nanoseconds; index 0 is a batch of 1, as in
        `transfer_ns`."""
        self.transfer_ns = transfer_ns
        self.batch_size = len(compute_ns)
        self.later_ns: Nanoseconds = 0
        self.following: Queue | None = None
        """Queue of the next stage; None after the last stage."""
        self.order = [(member.free_at, index) for index, member in enumerate(members)]
        heapify(self.order)
        for index, member in enumerate(members):
            member.stages.append((self, index))

    def earliest_free(self) -> Vgpu:
        """Returns the member that is expected to be free first."""
        order, members = self.order, self.members
        while order[0][0] != members[order[0][1]].free_at:
            heappop(order)
        return members[order[0][1]]

    def finish(self, vgpu: Vgpu, rows: int, now: Nanoseconds) -> Nanoseconds:
        """Returns when a batch would end on this member if the links were free."""
        ready = now + self.transfer_ns[rows - 1]
        return max(ready, vgpu.free_at) + self.compute_ns[rows - 1]

    def largest(self, vgpu: Vgpu, deadline: Nanoseconds, now: Nanoseconds) -> int:
        """Returns the largest batch that leaves the later stages their planned time; 0 if none."""
        until = deadline - self.later_ns
        for rows in range(self.batch_size, 0, -1):
            if self.finish(vgpu, rows, now) <= until:
                return rows
        return 0


class Queue:
    """Rows that wait for any of some stages: the first ones of a model, or one later stage."""

    __slots__ = ("model", "rows", "stages", "wake")

    def __init__(self, model: ModelKey, stages: list[Stage]) -> None:
        self.model = model
        self.stages = stages
        self.rows: list[tuple[tuple[int, Nanoseconds, int, int], Row]] = []
        self.wake: Nanoseconds | None = None

    def push(self, row: Row) -> None:
        """Inserts a row by its key."""
        row.queued = True
        insort(self.rows, (row.key, row))

    def take(self, count: int) -> list[Row]:
        """Removes and returns the `count` most urgent rows."""
        taken = [row for _, row in self.rows[:count]]
        del self.rows[:count]
        for row in taken:
            row.queued = False
        return taken

    def remove(self, row: Row) -> None:
        """Removes a row that waits here."""
        self.rows.remove((row.key, row))
        row.queued = False


def entry_queue(model: ModelPlan, vgpus: Mapping[AgentId, Vgpu]) -> tuple[Queue, list[Queue]]:
    """Returns the queue in which a model's rows wait first, and all queues behind it."""
    first: list[Stage] = []
    behind: list[Queue] = []
    for pipeline in model.pipelines:
        stages = _stages(pipeline, vgpus)
        if not stages:
            continue
        for before, stage in pairwise(stages):
            before.following = Queue(model.model, [stage])
            behind.append(before.following)
        later = 0
        for stage in reversed(stages):
            stage.later_ns = later
            later += stage.compute_ns[-1] + stage.transfer_ns[-1]
        first.append(stages[0])
    return Queue(model.model, first), behind


def _stages(pipeline: Pipeline, vgpus: Mapping[AgentId, Vgpu]) -> list[Stage]:
    """Returns the stages of a pipeline; none if one of them has no agent."""
    pools = [
        [vgpus[agent] for agent in dict.fromkeys(stage.agents) if agent in vgpus]
        for stage in pipeline.stages
    ]
    if not all(pools):
        return []
    size = min(pipeline.batch_size, *(len(stage.compute_ns) for stage in pipeline.stages))
    stages = []
    for at, (planned, pool) in enumerate(zip(pipeline.stages, pools, strict=True)):
        speed = min(
            max(member.bytes_per_second for member in pools[i]) for i in (max(at - 1, 0), at)
        )
        row_bytes = planned.input_bytes if at else 0
        transfers = tuple(
            -(-rows * row_bytes * NANOSECONDS_PER_SECOND // speed) for rows in range(1, size + 1)
        )
        compute = tuple(max(1, duration) for duration in planned.compute_ns[:size])
        stages.append(Stage(planned.partition, pool, compute, transfers))
    return stages
