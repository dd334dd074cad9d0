"""A queue of complete batches; the one with the earliest reservation comes first."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catenary_agent.engine.batch import Batch


class ReadyQueue:
    """A heap by start of reservation; batches with equal starts keep their order of arrival.

    Cancelled batches are dropped when they come to the top. The bytes the engine may hold bound its
    length: every batch in it owns at least one received frame.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Batch]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return sum(not batch.cancelled for _, _, batch in self._heap)

    def batches(self) -> list[Batch]:
        """Returns the queued batches in no particular order."""
        return [batch for _, _, batch in self._heap if not batch.cancelled]

    def push(self, batch: Batch) -> None:
        heapq.heappush(self._heap, (batch.reserved_start_ns, next(self._arrivals), batch))

    def peek(self) -> Batch | None:
        """Returns the batch that `pop` would return; None if there is none."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Batch | None:
        """Removes and returns the batch with the earliest reservation; None if there is none."""
        batch = self.peek()
        if batch is not None:
            heapq.heappop(self._heap)
        return batch
