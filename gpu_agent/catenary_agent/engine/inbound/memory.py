"""The batches the engine holds, and the bytes of their received tensors."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from catenary_services.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from catenary_agent.engine.batch import Batch

_REMEMBERED = 8_192

K = TypeVar("K")


class HeldBatches:
    """The batches in this agent, and those it has finished lately.

    Invariant: `nbytes` is the sum over received payloads that were not given back yet.
    """

    def __init__(self, max_bytes: int) -> None:
        """Refuses payloads that would make the sum exceed `max_bytes`."""
        self._max_bytes = max_bytes
        self._batches: dict[tuple[int, int], Batch] = {}
        self._gone: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        self.nbytes = 0
        self.empty = asyncio.Event()
        """Set while no batch is held."""
        self.empty.set()

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, identity: tuple[int, int]) -> bool:
        return identity in self._batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(list(self._batches.values()))

    def claim(self, nbytes: int) -> None:
        """Counts a payload.

        Raises:
            Overloaded: The limit would be exceeded; nothing was counted.
        """
        if self.nbytes + nbytes > self._max_bytes:
            raise Overloaded(f"{self.nbytes} bytes of tensors wait on this agent already")
        self.nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Subtracts a payload from the count."""
        self.nbytes -= nbytes
        assert self.nbytes >= 0

    def add(self, batch: Batch) -> None:
        self._batches[batch.identity] = batch
        self.empty.clear()

    def remove(self, batch: Batch) -> None:
        """Removes a batch; its rows are ignored if they arrive again."""
        self._batches.pop(batch.identity, None)
        if not self._batches:
            self.empty.set()
        self.remember_gone(batch.identity)

    def remember_gone(self, identity: tuple[int, int]) -> None:
        """Makes `is_over` true for this hop of this batch, so that its rows are ignored."""
        _remember(self._gone, identity)

    def remember_cancelled(self, batch_id: int) -> None:
        """Makes `is_over` true for every hop of this batch, so that its rows are ignored."""
        _remember(self._cancelled, batch_id)

    def is_over(self, batch_id: int, position: int) -> bool:
        """Returns True if rows of this batch are no longer needed at this hop."""
        return (batch_id, position) in self._gone or batch_id in self._cancelled

    def of(self, batch_id: int) -> list[Batch]:
        """Returns all hops of a batch that are held here."""
        return [batch for batch in self._batches.values() if batch.batch_id == batch_id]


def _remember(memory: OrderedDict[K, None], key: K) -> None:
    memory[key] = None
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
