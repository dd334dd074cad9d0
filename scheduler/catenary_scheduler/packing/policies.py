"""Interface of the policies that decide, epoch by epoch, where sessions live."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from catenary_scheduler.packing.moves import EpochResult, Item


class PackingPolicy(Protocol):
    """A policy that keeps the sessions of one model on GPUs (or chains) of one capacity.

    Sizes and the capacity are integers in one unit, usually blocks of 16 tokens. Bins are named by
    integers that stay while they are active. No GPU ever holds more than its capacity after an
    epoch; a GPU without sessions is not active.
    """

    def epoch(
        self, departed: Iterable[Item], sizes: Mapping[Item, int], arrived: Mapping[Item, int]
    ) -> EpochResult:
        """Applies everything that happened since the last epoch, and returns what changes.

        Args:
            departed: Sessions that are over, placed or queued.
            sizes: Sizes that running sessions will have at the end of the coming epoch. A session
                that is missing keeps its size. Queued sessions may be included.
            arrived: Sizes that new sessions will have, in the order of their arrival.

        Raises:
            InvalidInput: A session does not fit a GPU, is not known, or is known already; nothing
                has changed then.
        """
        ...

    def place(self, item: Item, size: int, gpu: int, /) -> None:
        """Adopts a session that another component has put on a GPU."""
        ...

    def bin_of(self, item: Item) -> int | None:
        """Returns the GPU of a session; None if it is queued or unknown."""
        ...

    def size_of(self, item: Item) -> int:
        """Returns the memory that a placed session holds, in the unit of the capacity."""
        ...

    def bins(self) -> Mapping[int, Sequence[Item]]:
        """Returns the active GPUs and the sessions on each of them."""
        ...
