"""Recent bookings of devices and links, and the times that agents report for them.

Noting a dispatch costs one entry in a queue: commands are immutable and say everything as it was
booked. All other work is done when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from catenary_scheduler.dispatch.events import (
    DispatchBatch,
    ExtendWindow,
    GrantWindow,
    PlannedHop,
    StageReported,
)
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    ModelKey,
    Nanoseconds,
)

LONGEST_NS = 30 * NANOSECONDS_PER_SECOND
"""Batches that were to end longer ago than this are forgotten."""
_MOST_BATCHES = 16_384
_MOST_SPANS = 8_192
_MOST_WINDOWS = 1_024
_ROUND_NS = 20_000_000
"""Reports of one agent within this time of each other describe the same stretch of time."""

Kind = Literal["gpu", "link"]
Interval = tuple[Nanoseconds, Nanoseconds]


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """One use of a device, or of the links between two agents, by one batch.

    Attributes:
        kind: "gpu", or "link" for the uplink of `sender`'s server and the downlink of `agent`'s.
        agent: The agent that computes, or receives.
        sender: The agent that sends; None for a device.
        batch: The batch; 0 for text generation, which is not booked by time.
        model: The model whose work it is.
        rows: Rows of the batch.
        booked: Start and end as dispatched; None if it was not booked.
        real: Start and end as reported; None before the report.
    """

    kind: Kind
    agent: AgentId
    sender: AgentId | None
    batch: BatchId
    model: ModelKey
    rows: int
    booked: Interval | None
    real: Interval | None


class TimelineEntry:
    """A dispatched batch, and when each hop really ran: computing, and the transfer before it."""

    __slots__ = ("command", "dispatched_ns", "real")

    def __init__(self, command: DispatchBatch, dispatched_ns: Nanoseconds) -> None:
        self.command = command
        self.dispatched_ns = dispatched_ns
        self.real: dict[int, tuple[Interval, Interval | None]] = {}

    def uses(self) -> Iterator[ResourceUse]:
        """Yields the uses of devices and links, hop by hop."""
        command, sender = self.command, None
        for position, hop in enumerate(command.path):
            model, rows = hop.partition.model, command.rows
            computed, moved = self.real.get(position, (None, None))
            if hop.transfer_ns and sender is not None:
                begin = hop.transfer_start_ns
                booked = (begin, begin + hop.transfer_ns)
                yield ResourceUse(
                    "link", hop.agent, sender, command.batch, model, rows, booked, moved
                )
            booked = (hop.start_ns, hop.start_ns + hop.duration_ns)
            yield ResourceUse("gpu", hop.agent, None, command.batch, model, rows, booked, computed)
            sender = hop.agent


class Timelines:
    """The batches and generation steps of the last half minute, in bounded memory."""

    def __init__(self, most_batches: int = _MOST_BATCHES, most_spans: int = _MOST_SPANS) -> None:
        self._most = most_batches
        self._entries: deque[TimelineEntry] = deque()
        self._by_id: dict[BatchId, TimelineEntry] = {}
        self._windows: dict[BatchId, GrantWindow] = {}
        """The latest windows by id; ids ascend."""
        self._window_ids: list[BatchId] = []
        self._spans: deque[ResourceUse] = deque(maxlen=most_spans)
        self._rounds: dict[AgentId, tuple[Nanoseconds, Nanoseconds, Nanoseconds]] = {}
        """Moment of the latest reports, moment of the reports before, and start of the work that
        the latest ones describe, by agent."""
        self._complete_since: Nanoseconds = 0

    def dispatched(self, command: DispatchBatch, now: Nanoseconds) -> None:
        entry = TimelineEntry(command, now)
        entries = self._entries
        entries.append(entry)
        self._by_id[command.batch] = entry
        while entries[0] is not entry and entries[0].command.expected_finish_ns < now - LONGEST_NS:
            del self._by_id[entries.popleft().command.batch]
        if len(entries) > self._most:
            oldest = entries.popleft().command
            del self._by_id[oldest.batch]
            self._complete_since = oldest.expected_finish_ns

    def granted(self, command: GrantWindow) -> None:
        """Notes a window, whose batches are known once agents report them."""
        self._windows[command.window] = command
        self._window_ids.append(command.window)
        if len(self._window_ids) > _MOST_WINDOWS:
            del self._windows[self._window_ids.pop(0)]

    def extended(self, command: ExtendWindow) -> GrantWindow | None:
        """Notes that a window has more time; returns the window, None if it is not remembered."""
        grant = self._windows.get(command.window)
        if grant is None:
            return None
        ends = zip(grant.hops, command.ends_ns, strict=True)
        hops = tuple([hop._replace(end_ns=end) for hop, end in ends])
        grant = self._windows[command.window] = replace(grant, hops=hops)
        return grant

    def window(self, window: BatchId) -> GrantWindow | None:
        """Returns a window of late; None if it is not remembered."""
        return self._windows.get(window)

    def window_of(self, batch: BatchId) -> GrantWindow | None:
        """Returns the window by which a batch was sent; None if none is remembered."""
        at = bisect_right(self._window_ids, batch) - 1
        grant = self._windows[self._window_ids[at]] if at >= 0 else None
        return grant if grant is not None and grant.has(batch) else None

    def reported(self, event: StageReported) -> tuple[PlannedHop, int] | None:
        """Notes when a hop really ran.

        Returns:
            The hop as booked and the size of its batch; None if the batch is not remembered.
        """
        entry = self._by_id.get(event.batch) or self._sent_by_window(event)
        if entry is None or event.position >= len(entry.command.path):
            return None
        moved = None
        if event.transfer_start_ns is not None and event.transfer_end_ns is not None:
            moved = (event.transfer_start_ns, event.transfer_end_ns)
        entry.real[event.position] = ((event.compute_start_ns, event.compute_end_ns), moved)
        return entry.command.path[event.position], entry.command.size

    def generated(
        self, agent: AgentId, model: ModelKey, busy_ns: Nanoseconds, now: Nanoseconds
    ) -> None:
        """Notes that an agent generated for `busy_ns` since its last report.

        The single steps are not known: they are shown as one use that ends with the report.
        """
        if busy_ns <= 0:
            return
        said, before, begin = self._rounds.get(agent, (now - LONGEST_NS, 0, 0))
        if now - said > _ROUND_NS:
            said, before, begin = now, said, now
        start = max(before, begin - busy_ns)  # of two models, one before the other
        self._rounds[agent] = said, before, start
        if start < begin:
            real = (start, begin)
            self._spans.append(ResourceUse("gpu", agent, None, BatchId(0), model, 0, None, real))

    def batches(self) -> list[TimelineEntry]:
        """Returns the batches that are remembered, oldest first."""
        return list(self._entries)

    def spans(self) -> list[ResourceUse]:
        """Returns the remembered stretches of text generation."""
        return list(self._spans)

    def is_complete(self, since: Nanoseconds) -> bool:
        """True if everything since that moment is still remembered."""
        full = len(self._spans) == self._spans.maxlen and self._spans[0].real is not None
        spans_since = self._spans[0].real[0] if full and self._spans[0].real else 0
        return since >= max(self._complete_since, spans_since)

    def entry(self, batch: BatchId) -> TimelineEntry | None:
        return self._by_id.get(batch)

    def __contains__(self, batch: BatchId) -> bool:
        return batch in self._by_id

    def _sent_by_window(self, event: StageReported) -> TimelineEntry | None:
        """Notes a batch of a window of which an agent speaks first, and returns its entry."""
        grant = self.window_of(event.batch)
        if grant is None or not 1 <= event.rows <= len(grant.hops[0].compute_ns):
            return None
        start = event.compute_start_ns
        self.dispatched(grant.sent(event.batch, event.rows, start), start)
        return self._by_id[event.batch]
