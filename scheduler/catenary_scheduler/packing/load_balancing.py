"""Load balancing by moves from the fullest GPU to the emptiest (as in Llumnix)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from catenary_scheduler.packing.moves import Item, PackingMove

THRESHOLD_SHARE = 0.1
"""Share of the capacity by which the loads of GPUs may differ and still count as even."""


@dataclass(frozen=True, slots=True)
class _Fitting:
    """A session, and the difference between the loads of two GPUs that its move would leave."""

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

    Each move takes the session that brings the two GPUs closest together. It always brings them
    closer, so the search ends. Ties go to the lower GPU number, the larger session, and the one
    named first. The search stops early if no session of the fullest GPU helps.

    Args:
        loads: Load of every GPU that takes part, with everything it holds; empty GPUs included.
        movable: Sizes of the sessions that may move, by GPU. They are part of the loads.
        threshold: Difference of loads up to which GPUs count as even.
        most_moves: Largest number of moves; None for any number.

    Time: O(GPUs), and for each move as much again and a pass over two GPUs' sessions.
    """
    load = dict(loads)
    there: dict[int, dict[Item, int]] = {}  # only the GPUs that moves have touched
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
    """Returns the session whose move leaves the least difference; None if none makes it smaller."""
    best: _Fitting | None = None
    for item, size in items.items():
        left = abs(difference - 2 * size)
        if 0 < size < difference and (best is None or (left, -size) < (best.left, -best.size)):
            best = _Fitting(left, size, item)
    return best
