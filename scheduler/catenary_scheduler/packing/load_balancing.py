"""Even load: moves from the fullest GPU to the emptiest (as Llumnix does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from catenary_scheduler.packing.moves import Item, PackingMove

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
) -> list[PackingMove]:
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
    moves: list[PackingMove] = []
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
        moves.append(PackingMove(best.item, fullest, emptiest, best.size))
    return moves


def _closest(items: Mapping[Item, int], difference: int) -> _Fitting | None:
    """Returns whose move leaves the least difference; None if every one would leave as much."""
    best: _Fitting | None = None
    for item, size in items.items():
        left = abs(difference - 2 * size)
        if 0 < size < difference and (best is None or (left, -size) < (best.left, -best.size)):
            best = _Fitting(left, size, item)
    return best
