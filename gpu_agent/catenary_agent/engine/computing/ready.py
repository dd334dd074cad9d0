"""Batches that can be computed, the one with the earliest reservation first."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catenary_agent.engine.batch import Batch


class ReadyQueue:
    """A heap by start of reservation; equal starts keep their order of arrival.

    Cancelled batches are dropped when they come to the top. Bounded by the bytes the engine holds:
    every batch in it owns at least one received frame.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Batch]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return sum(not batch.cancelled for _, _, batch in self._heap)

    def batches(self) -> list[Batch]:
        """Returns what waits, in no particular order."""
        return [batch for _, _, batch in self._heap if not batch.cancelled]

    def push(self, batch: Batch) -> None:
        """Adds a batch."""
        heapq.heappush(self._heap, (batch.reserved_start_ns, next(self._arrivals), batch))

    def peek(self) -> Batch | None:
        """Returns the batch `pop` would return."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Batch | None:
        """Removes and returns the batch with the earliest reservation; None if there is none."""
        batch = self.peek()
        if batch is not None:
            heapq.heappop(self._heap)
        return batch
