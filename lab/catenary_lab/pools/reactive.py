"""The baseline without reservations: every pool batches for itself (PPipe, section 7.4).

At each stage the earliest-free virtual GPU gets the largest batch, up to the planned size, whose
transfer and compute leave the later stages the time the plan gives them. Nothing is booked: links
are taken to be free, and the load of the next stage is found out only when the rows are there. As
in Algorithm 1, rows that are fewer than that batch wait until the last moment at which one more
would still be in time, and a row whose batch of one would be late is dropped.

A batch has a path of one hop. Its rows then wait, on the agent that computed them, for the next.
The simulator runs it for comparison with `PooledDispatcher`; agents in service are source-routed
and cannot hold feature maps for a later order.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from catenary_lab.pools.reactive_pools import Queue, Row, Stage, Vgpu, entry_queue
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
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    StageReported,
)
from catenary_scheduler.dispatch.pooled.config import PooledConfig
from catenary_services.domain.ids import AgentId, BatchId, ModelKey, Nanoseconds, RequestId
from catenary_services.domain.plan import Agent, Plan
from catenary_services.errors import DeadlineExceeded, NoActivePlan, PartitionLost, SloUnattainable


class _Sent:
    """A batch under way to an agent, or on it."""

    __slots__ = ("batch", "rows", "stage", "vgpu")

    def __init__(self, batch: BatchId, rows: list[Row], stage: Stage, vgpu: Vgpu) -> None:
        self.batch = batch
        self.rows = rows
        self.stage = stage
        self.vgpu = vgpu


class ReactiveDispatcher:
    """A dispatcher with independent, adaptive batching in every pool."""

    def __init__(
        self,
        config: PooledConfig | None = None,
        *,
        stopwatch: Callable[[], Nanoseconds] | None = None,
    ) -> None:
        self._config = config or PooledConfig()
        self._stopwatch = stopwatch
        self._decision_ns: list[Nanoseconds] = []
        self._now: Nanoseconds = 0
        self._commands: list[Command] = []
        self._agents: dict[AgentId, Agent] = {}
        self._vgpus: dict[AgentId, Vgpu] = {}
        self._plan: Plan | None = None
        self._entries: dict[ModelKey, Queue] = {}
        self._queues: list[Queue] = []
        self._dirty: dict[Queue, None] = {}
        self._open: dict[RequestId, list[Row]] = {}
        self._timers: list[tuple[Nanoseconds, int, RequestId]] = []
        self._sent: dict[BatchId, _Sent] = {}
        self._counters = dict.fromkeys(
            (
                "arrived_requests",
                "rejected_requests",
                "decisions",
                "dispatched_batches",
                "dispatched_rows",
                "retried_rows",
            ),
            0,
        )

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Updates the state by one event and returns the commands that follow from it, in order."""
        self._now = now
        if isinstance(event, RequestArrived):
            self._arrived(event)
        elif isinstance(event, StageReported):
            self._reported(event)
        elif isinstance(event, RequestCompleted | RequestCancelled):
            self._forget(event.request)
        elif isinstance(event, BatchFailed):
            self._failed(event)
        elif isinstance(event, AgentJoined):
            self._agents[event.agent.agent_id] = event.agent
            self._rebuild()
        elif isinstance(event, AgentLost):
            self._lost(event.agent)
        elif isinstance(event, PlanActivated):
            self._plan = event.plan
            self._rebuild()
        self._on_time()
        self._serve()
        commands, self._commands = self._commands, []
        return commands

    def next_wakeup(self) -> Nanoseconds | None:
        """Returns the time by which a `Tick` is due; None if nothing waits for time to pass."""
        moments = [queue.wake for queue in self._queues if queue.wake is not None]
        while self._timers and self._timers[0][2] not in self._open:
            heappop(self._timers)
        if self._timers:
            moments.append(self._timers[0][0])
        return min(moments, default=None)

    def statistics(self) -> dict[str, int]:
        """Returns counters since the start, and gauges of the present state."""
        return {
            **self._counters,
            "queued_rows": sum(len(queue.rows) for queue in self._queues),
            "open_requests": len(self._open),
            "batches_in_flight": len(self._sent),
        }

    def take_decision_times(self) -> list[Nanoseconds]:
        """Returns how long each decision since the last call took; empty without a stopwatch."""
        times, self._decision_ns = self._decision_ns, []
        return times

    # Events

    def _arrived(self, event: RequestArrived) -> None:
        self._counters["arrived_requests"] += 1
        entry = self._entries.get(event.model)
        if entry is None or not entry.stages:
            self._reject(event.request, NoActivePlan.reason, f"no plan serves {event.model}")
            return
        sequence = self._counters["arrived_requests"]
        rows = [
            Row(event.request, n, event.model, (-event.priority, event.deadline_ns, sequence, n))
            for n in range(event.rows)
        ]
        self._open[event.request] = rows
        last_moment = event.deadline_ns + self._config.deadline_grace_ns
        heappush(self._timers, (last_moment, sequence, event.request))
        self._enqueue(entry, rows)

    def _reported(self, event: StageReported) -> None:
        sent = self._sent.pop(event.batch, None)
        if sent is None:
            return
        sent.vgpu.done(event.batch, event.compute_end_ns)
        following = sent.stage.following
        rows = [row for row in sent.rows if row.open]
        if following is not None and rows:
            for row in rows:
                row.at = sent.vgpu.agent
            if following in self._queues:
                self._enqueue(following, rows)
            else:  # the pool is of a plan that is over
                self._restart(rows)
        for queue in self._queues:
            if queue.rows and sent.stage in queue.stages:
                self._dirty[queue] = None

    def _failed(self, event: BatchFailed) -> None:
        sent = self._sent.pop(event.batch, None)
        if sent is None:
            return
        sent.vgpu.done(event.batch, self._now)
        if event.retryable:
            self._restart(sent.rows)
            return
        for row in sent.rows:
            if row.open:
                self._reject(row.request, event.reason, event.message)

    def _lost(self, agent: AgentId) -> None:
        """Restarts all rows that a lost agent held or was to compute, from the gateway's copies."""
        self._agents.pop(agent, None)
        self._vgpus.pop(agent, None)
        rows: list[Row] = []
        for sent in list(self._sent.values()):
            if sent.vgpu.agent == agent:
                del self._sent[sent.batch]
                rows += sent.rows
        for queue in self._queues:
            for _, row in list(queue.rows):
                if row.at == agent:
                    queue.remove(row)
                    rows.append(row)
        self._rebuild()
        self._restart(rows)

    def _rebuild(self) -> None:
        """Takes over plan and agents; waiting rows start again, batches under way go on."""
        waiting = [row for queue in self._queues for _, row in queue.rows]
        for vgpu in self._vgpus.values():
            vgpu.stages.clear()
        for agent_id, agent in self._agents.items():
            if agent_id not in self._vgpus:
                self._vgpus[agent_id] = Vgpu(agent)
        self._entries.clear()
        self._queues.clear()
        self._dirty.clear()
        for model in self._plan.models if self._plan else ():
            entry, behind = entry_queue(model, self._vgpus)
            self._entries[model.model] = entry
            self._queues += [entry, *behind]
        self._restart(waiting, again=False)

    def _on_time(self) -> None:
        while self._timers and self._timers[0][0] <= self._now:
            request = heappop(self._timers)[2]
            if request in self._open:
                self._reject(request, DeadlineExceeded.reason, "no result before the deadline")

    # Requests

    def _enqueue(self, queue: Queue, rows: list[Row]) -> None:
        for row in rows:
            queue.push(row)
        self._dirty[queue] = None

    def _restart(self, rows: list[Row], *, again: bool = True) -> None:
        """Puts rows back to the beginning; `again` says that they lose an attempt."""
        for row in rows:
            row.queued = False
            if not row.open:
                continue
            row.at = None
            row.attempt += again
            self._counters["retried_rows"] += again
            entry = self._entries.get(row.model)
            if row.attempt >= self._config.max_attempts:
                self._reject(row.request, PartitionLost.reason, f"lost {row.attempt} times")
            elif entry is None or not entry.stages:
                self._reject(row.request, NoActivePlan.reason, f"no plan serves {row.model}")
            else:
                self._enqueue(entry, [row])

    def _reject(self, request: RequestId, reason: str, message: str) -> None:
        self._counters["rejected_requests"] += 1
        self._commands.append(Reject(request, reason, message, self._config.retry_after_ns))
        self._forget(request)

    def _forget(self, request: RequestId) -> None:
        rows = self._open.pop(request, ())
        for row in rows:
            row.open = False
        if any(row.queued for row in rows):
            for queue in self._queues:
                for _, row in [entry for entry in queue.rows if entry[1].request == request]:
                    queue.remove(row)

    # Decisions

    def _serve(self) -> None:
        now = self._now
        for queue in self._queues:
            if queue.wake is not None and queue.wake <= now:
                self._dirty[queue] = None
        while self._dirty:
            queue = next(iter(self._dirty))
            queue.wake = None
            if not queue.rows or self._timed_step(queue):
                self._dirty.pop(queue, None)

    def _timed_step(self, queue: Queue) -> bool:
        self._counters["decisions"] += 1
        if self._stopwatch is None:
            return self._step(queue)
        before = self._stopwatch()
        waits = self._step(queue)
        self._decision_ns.append(self._stopwatch() - before)
        return waits

    def _step(self, queue: Queue) -> bool:
        """Decides once for the head of a queue; True if the queue has to wait now."""
        now, head = self._now, queue.rows[0][1]
        for stage, vgpu in self._candidates(queue):
            rows = stage.largest(vgpu, head.deadline, now)
            if not rows:
                continue
            waiting = len(queue.rows)
            if waiting < rows:
                until = head.deadline - stage.later_ns
                until -= stage.transfer_ns[waiting] + stage.compute_ns[waiting]
                until -= self._config.safety_margin_ns
                if until > now:
                    queue.wake = until
                    return True
                rows = waiting
            self._send(queue.take(rows), stage, vgpu)
            return False
        self._reject(head.request, SloUnattainable.reason, "would finish after its deadline")
        return False

    def _candidates(self, queue: Queue) -> list[tuple[Stage, Vgpu]]:
        """Returns the earliest-free member of each pool, those with the shortest wait first."""
        found = [(stage, stage.earliest_free()) for stage in queue.stages]
        if len(found) > 1:
            found.sort(key=self._wait)
        return found

    def _wait(self, candidate: tuple[Stage, Vgpu]) -> Nanoseconds:
        stage, vgpu = candidate
        return max(0, vgpu.free_at - self._now - stage.transfer_ns[-1])

    def _send(self, rows: list[Row], stage: Stage, vgpu: Vgpu) -> None:
        batch, count = BatchId(self._counters["dispatched_batches"] + 1), len(rows)
        duration = stage.compute_ns[count - 1]
        finish = vgpu.give(batch, self._now + stage.transfer_ns[count - 1], duration)
        slices = tuple(BatchSlice(row.request, row.number, 1, at) for at, row in enumerate(rows))
        hop = PlannedHop(vgpu.agent, stage.partition, finish - duration, duration)
        self._sent[batch] = _Sent(batch, rows, stage, vgpu)
        self._commands.append(DispatchBatch(batch, count, slices, (hop,), finish))
        self._counters["dispatched_batches"] += 1
        self._counters["dispatched_rows"] += count
