"""The batches in flight: recorded in Redis, and asked about before an agent or partition goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from catenary_scheduler.dispatch.events import (
    BatchFailed,
    DispatchBatch,
    Event,
    PlannedHop,
    StageReported,
)
from catenary_scheduler.storage.journal import Journal
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.records import batch_text
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    Nanoseconds,
    PartitionKey,
)
from catenary_services.telemetry.metrics import Metrics

_FORGET_AFTER_NS = 10 * NANOSECONDS_PER_SECOND


@dataclass(slots=True)
class _Entry:
    command: DispatchBatch
    done: int = 0
    """Number of hops reported as computed."""


class InFlightBatches:
    """All batches in flight, each from its dispatch until its last hop is reported or it fails."""

    observes = (StageReported, BatchFailed)
    table = RedisTable.BATCHES

    def __init__(self) -> None:
        self._batches: dict[BatchId, _Entry] = {}
        self.dirty: set[BatchId] = set()
        """The batches that began or ended since the last `collect`."""
        self._written: set[BatchId] = set()
        """The batches whose records are in Redis, once the journal is written."""

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, batch: BatchId) -> bool:
        return batch in self._batches

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Notes a computed hop, or the failure of a batch."""
        if isinstance(event, StageReported):
            self.stage_done(event.batch, event.position)
        elif isinstance(event, BatchFailed):
            self.over(event.batch)

    def dispatched(self, command: DispatchBatch) -> None:
        self._batches[command.batch] = _Entry(command)
        self.dirty.add(command.batch)

    def extended(self, command: DispatchBatch) -> None:
        """Takes a new end of a batch in flight, or of a window; its record stays as it is."""
        entry = self._batches.get(command.batch)
        if entry is not None:
            entry.command = command

    def stage_done(self, batch: BatchId, position: int) -> None:
        """Notes that a hop was computed; after the last hop the batch is over."""
        entry = self._batches.get(batch)
        if entry is None:
            return
        entry.done = max(entry.done, position + 1)
        if entry.done >= len(entry.command.path):
            self.over(batch)

    def over(self, batch: BatchId) -> None:
        """Forgets a batch that failed, was cancelled or is done."""
        if self._batches.pop(batch, None) is not None:
            self.dirty.add(batch)

    def tick(self, now: Nanoseconds) -> None:
        """Forgets the batches that nobody has reported on for long."""
        late = [
            batch
            for batch, entry in self._batches.items()
            if entry.command.expected_finish_ns + _FORGET_AFTER_NS < now
        ]
        for batch in late:
            self.over(batch)

    def export(self, metrics: Metrics) -> None:
        metrics.batches_in_flight.set(len(self._batches))

    def batches(self) -> list[BatchId]:
        return list(self._batches)

    def by_agent(self) -> Counter[AgentId]:
        """Returns how many batches have yet to be computed by each agent."""
        return Counter(
            agent
            for entry in self._batches.values()
            for agent in {hop.agent for hop in entry.command.path[entry.done :]}
        )

    def uses_agent(self, agent: AgentId) -> bool:
        """Returns True if a batch has yet to be computed by `agent`."""
        return any(hop.agent == agent for hop in self._hops_ahead())

    def uses_partition(self, agent: AgentId, partition: PartitionKey) -> bool:
        """Returns True if a batch has yet to be computed by this partition on this agent."""
        return any(hop.agent == agent and hop.partition == partition for hop in self._hops_ahead())

    def lost(self, agent: AgentId) -> None:
        """Forgets the batches that needed a lost agent."""
        gone = [
            batch
            for batch, entry in self._batches.items()
            if any(hop.agent == agent for hop in entry.command.path[entry.done :])
        ]
        for batch in gone:
            self.over(batch)

    def collect(self, journal: Journal) -> None:
        """Writes the batches that changed since the last call; one that came and went is free."""
        written = self._written
        for batch in self.dirty:
            entry = self._batches.get(batch)
            if entry is not None:
                written.add(batch)
                journal.put(RedisTable.BATCHES, str(batch), batch_text(entry.command))
            elif batch in written:
                written.remove(batch)
                journal.put(RedisTable.BATCHES, str(batch), None)
        self.dirty.clear()

    def records(self) -> dict[str, str | None]:
        self.dirty.clear()
        self._written = set(self._batches)
        return {str(key): batch_text(entry.command) for key, entry in self._batches.items()}

    def _hops_ahead(self) -> Iterator[PlannedHop]:
        for entry in self._batches.values():
            yield from entry.command.path[entry.done :]
