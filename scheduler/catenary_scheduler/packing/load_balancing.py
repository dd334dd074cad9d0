"""Even load: worst fit, and moves from the fullest GPU to the emptiest (as Llumnix does).

The same moves serve a deployment whose goal is "balance" and the rival that Mell is measured by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from catenary_scheduler.packing.baselines import WorstFit
from catenary_scheduler.packing.moves import Item, Move

THRESHOLD_SHARE = 0.1
"""Of the capacity: GPUs whose loads differ by no more than this are even enough."""


@dataclass(frozen=True, slots=True)
class _Fitting:
    """A session and what moving it would leave of the difference between two GPUs."""

    left: int
    size: int
    item: Item


def balancing_moves(
    loads: Mapping[int, int],
    movable: Mapping[int, Mapping[Item, int]],
    threshold: int,
    most_moves: int | None = None,
) -> list[Move]:
    """Returns moves from the fullest GPU to the emptiest, until they are even enough.

    Each move is of the session that brings the two GPUs closest together; it always brings them
    closer, so there is an end. Equal choices go by the lower GPU, the larger session, the one named
    first. Stops early when the fullest GPU has no session that helps.

    Args:
        loads: Of every GPU that takes part, with everything it holds; empty ones included.
        movable: Sessions that may move, by GPU, with their sizes; part of the loads.
        threshold: Loads that differ by no more than this stay.
        most_moves: No more than so many; None: as many as it takes.

    Time: O(GPUs), and for each move as much again and a pass over two GPUs' sessions.
    """
    load = dict(loads)
    there: dict[int, dict[Item, int]] = {}  # of the GPUs that moves have touched
    moves: list[Move] = []
    while len(load) > 1 and (most_moves is None or len(moves) < most_moves):
        fullest = min(load, key=lambda gpu: (-load[gpu], gpu))
        emptiest = min(load, key=lambda gpu: (load[gpu], gpu))
        difference = load[fullest] - load[emptiest]
        if difference <= threshold:
            break
        best = _closest(there.get(fullest, movable.get(fullest, {})), difference)
        if best is None:
            break
        for gpu in (fullest, emptiest):
            there.setdefault(gpu, dict(movable.get(gpu, {})))
        del there[fullest][best.item]
        there[emptiest][best.item] = best.size
        load[fullest] -= best.size
        load[emptiest] += best.size
        moves.append(Move(best.item, fullest, emptiest, best.size))
    return moves


def _closest(items: Mapping[Item, int], difference: int) -> _Fitting | None:
    """Returns whose move leaves the least difference; None if every one would leave as much."""
    best: _Fitting | None = None
    for item, size in items.items():
        left = abs(difference - 2 * size)
        if 0 < size < difference and (best is None or (left, -size) < (best.left, -best.size)):
            best = _Fitting(left, size, item)
    return best


class LoadBalancing(WorstFit):
    """Worst fit with migration: what overflows moves, then the loads are made even.

    Args:
        capacity: Of a GPU.
        most_bins: That may be active at a time; None: any number.
        threshold: Loads that differ by no more than this stay; None: a tenth of the capacity.
    """

    def __init__(
        self, capacity: int, *, most_bins: int | None = None, threshold: int | None = None
    ) -> None:
        super().__init__(capacity, most_bins=most_bins)
        self._threshold = int(THRESHOLD_SHARE * capacity) if threshold is None else threshold

    def _relieve(self, origins: dict[Item, int]) -> dict[Item, int]:
        """Moves the smallest session that suffices; only where no GPU has room one is preempted."""
        shelves = self._shelves
        for gpu in shelves.overflowing():
            while (excess := shelves.load_of(gpu) - shelves.capacity) > 0:
                item = self._relieving(shelves.items_of(gpu), excess)
                target = self._bin_for(shelves.size_of(item))
                if target is None:
                    break
                self._move(Move(item, gpu, target, shelves.size_of(item)), origins)
        return super()._relieve(origins)

    def _relieving(self, items: Iterable[Item], excess: int) -> Item:
        """Returns the smallest session of at least the excess; the largest if none is."""
        ordered = sorted(items, key=lambda item: (self._shelves.size_of(item), -self._ages[item]))
        enough = (item for item in ordered if self._shelves.size_of(item) >= excess)
        return next(enough, ordered[-1])

    def _rebalance(self, origins: dict[Item, int]) -> None:
        shelves = self._shelves
        loads = shelves.loads()
        if not loads or max(loads.values()) - min(loads.values()) <= self._threshold:
            return
        sizes = {
            gpu: {item: shelves.size_of(item) for item in items}
            for gpu, items in shelves.bins().items()
        }
        for move in balancing_moves(loads, sizes, self._threshold):
            self._move(move, origins)

    def _move(self, move: Move, origins: dict[Item, int]) -> None:
        origins.setdefault(move.item, move.source)
        self._shelves.take(move.item)
        self._shelves.put(move.item, move.size, move.target)
