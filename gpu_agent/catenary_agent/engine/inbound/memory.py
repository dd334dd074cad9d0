"""Which batches and how many bytes of theirs the engine holds."""

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


class Held:
    """The batches in this agent, and the ones it has finished lately.

    Invariant: `nbytes` is the sum over received payloads that were not given back yet.
    """

    def __init__(self, max_bytes: int) -> None:
        """Refuses payloads beyond `max_bytes`."""
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
            Overloaded: it would be too much; nothing was counted.
        """
        if self.nbytes + nbytes > self._max_bytes:
            raise Overloaded(f"{self.nbytes} bytes of tensors wait on this agent already")
        self.nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Takes a payload off the count."""
        self.nbytes -= nbytes
        assert self.nbytes >= 0

    def add(self, batch: Batch) -> None:
        """Begins to hold a batch."""
        self._batches[batch.identity] = batch
        self.empty.clear()

    def remove(self, batch: Batch) -> None:
        """Ends holding a batch; its rows are ignored if they come again."""
        self._batches.pop(batch.identity, None)
        if not self._batches:
            self.empty.set()
        self.remember_gone(batch.identity)

    def remember_gone(self, identity: tuple[int, int]) -> None:
        """Ignores this hop of this batch from now on."""
        _remember(self._gone, identity)

    def remember_cancelled(self, batch_id: int) -> None:
        """Ignores every hop of this batch from now on."""
        _remember(self._cancelled, batch_id)

    def is_over(self, batch_id: int, position: int) -> bool:
        """Returns True if rows of this batch are of no use any more."""
        return (batch_id, position) in self._gone or batch_id in self._cancelled

    def of(self, batch_id: int) -> list[Batch]:
        """Returns every hop of a batch that is held here."""
        return [batch for batch in self._batches.values() if batch.batch_id == batch_id]


def _remember(memory: OrderedDict[K, None], key: K) -> None:
    memory[key] = None
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
