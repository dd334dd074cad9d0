"""Even load as a policy of its own, a rival of Mell: worst fit, then moves that even out loads."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_lab.packing.baselines import WorstFit
from catenary_scheduler.packing.load_balancing import THRESHOLD_SHARE, balancing_moves
from catenary_scheduler.packing.moves import Item, PackingMove


class LoadBalancing(WorstFit):
    """Worst fit with migration: overflowing sessions move, then the loads are made even.

    Args:
        capacity: Capacity of a GPU, in blocks.
        most_bins: Largest number of active GPUs; None: any number.
        threshold: Loads that differ by no more than this stay; None: a tenth of the capacity.
    """

    def __init__(
        self, capacity: int, *, most_bins: int | None = None, threshold: int | None = None
    ) -> None:
        super().__init__(capacity, most_bins=most_bins)
        self._threshold = int(THRESHOLD_SHARE * capacity) if threshold is None else threshold

    def _relieve(self, origins: dict[Item, int]) -> dict[Item, int]:
        """Moves the smallest session that suffices, and preempts only where no GPU has room."""
        active_bins = self._active_bins
        for gpu in active_bins.overflowing():
            while (excess := active_bins.load_of(gpu) - active_bins.capacity) > 0:
                item = self._relieving(active_bins.items_of(gpu), excess)
                target = self._bin_for(active_bins.size_of(item))
                if target is None:
                    break
                self._move(PackingMove(item, gpu, target, active_bins.size_of(item)), origins)
        return super()._relieve(origins)

    def _relieving(self, items: Iterable[Item], excess: int) -> Item:
        """Returns the smallest session of at least the excess; the largest if all are smaller."""
        ordered = sorted(
            items, key=lambda item: (self._active_bins.size_of(item), -self._ages[item])
        )
        enough = (item for item in ordered if self._active_bins.size_of(item) >= excess)
        return next(enough, ordered[-1])

    def _rebalance(self, origins: dict[Item, int]) -> None:
        active_bins = self._active_bins
        loads = active_bins.loads()
        if not loads or max(loads.values()) - min(loads.values()) <= self._threshold:
            return
        sizes = {
            gpu: {item: active_bins.size_of(item) for item in items}
            for gpu, items in active_bins.bins().items()
        }
        for move in balancing_moves(loads, sizes, self._threshold):
            self._move(move, origins)

    def _move(self, move: PackingMove, origins: dict[Item, int]) -> None:
        origins.setdefault(move.item, move.source)
        self._active_bins.take(move.item)
        self._active_bins.put(move.item, move.size, move.target)
