"""Allocate: the operation that places a unit (Mell, Fig. 10, completions G1, G2, G7, G9)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from catenary_scheduler.packing.config import priority
from catenary_scheduler.packing.mell.sizes import LARGE, MEDIUM, TINY
from catenary_scheduler.packing.mell.state import (
    LOW_TINY,
    OPEN_MEDIUM,
    OPEN_SMALL,
    ROOMY,
    ROOMY_TINY,
    MellState,
)
from catenary_scheduler.packing.mell.units import Bin, PackingUnit


def place(state: MellState, unit: PackingUnit) -> bool:
    """Puts a unit on its preferred bin; False if all are full and no more may be activated."""
    target = choose(state, unit)
    if target is None:
        target = state.activate(origin_of(state, unit))
    if target is None:
        return False
    state.put(unit, target)
    return True


def choose(state: MellState, unit: PackingUnit) -> Bin | None:
    """Returns the preferred active bin for a unit; None if it needs a new one.

    A unit of class S or M may overflow the bin by the T units that are in its way.
    """
    if unit.kind == TINY:
        return _for_tiny(state, unit)
    if unit.kind == LARGE:
        return _for_large(state, unit)
    return _beside_large(state, unit) or _for_middle(state, unit)


def origin_of(state: MellState, unit: PackingUnit) -> int:
    """Returns the number of a unit's bin before this operation; -1 for an arrival."""
    for item in unit.members:
        return state.origins.get(item, -1)
    return -1


def in_the_way(state: MellState, unit: PackingUnit, target: Bin) -> int:
    """Returns how many T units have to leave a bin if a unit joins it."""
    excess = target.used + unit.size - state.capacity
    if excess <= 0:
        return 0
    count = 0
    for size in sorted([tiny.size for tiny in target.tinies], reverse=True):
        count += 1
        excess -= size
        if excess <= 0:
            break
    return count


def _for_tiny(state: MellState, unit: PackingUnit) -> Bin | None:
    found = _highest(state, unit, state.lists[ROOMY].values())
    if found is None:
        found = _fullest(state, unit, state.lists[LOW_TINY].values())
    if found is None:
        found = _fullest(state, unit, state.lists[ROOMY_TINY].values())
    return found


def _beside_large(state: MellState, unit: PackingUnit) -> Bin | None:
    """Returns an L-bin without S and M in which a unit fits beside the L, if T make room.

    Returns None if there is none.
    """
    solos = state.solos
    end = bisect_right(solos, (state.capacity - unit.size, 1 << 62))
    source = origin_of(state, unit)
    best: Bin | None = None
    least = 0
    most = 0.0
    for index in range(end):
        place = state.bins[solos[index][1]]
        leaving = in_the_way(state, unit, place)
        if leaving and not state.may_activate():
            continue
        rank = _rank(state, place, source)
        if best is None or leaving < least or (leaving == least and rank > most):
            best, least, most = place, leaving, rank
    return best


def _for_middle(state: MellState, unit: PackingUnit) -> Bin | None:
    """Returns the M- or S-bin that lacks a unit and has the fewest T in the way.

    Returns None if there is none.
    """
    kept = OPEN_MEDIUM if unit.kind == MEDIUM else OPEN_SMALL
    best: Bin | None = None
    least = (0, 0, 0)
    for place in state.lists[kept].values():
        leaving = in_the_way(state, unit, place)
        if leaving and not state.may_activate():
            continue
        cost = (leaving, -len(place.middles), -place.used)
        if best is None or cost < least:
            best, least = place, cost
    return best


def _for_large(state: MellState, unit: PackingUnit) -> Bin | None:
    """Returns a bin where an L finds its S or M, which saves a move into a new bin (rule 3)."""
    room = state.capacity - unit.size
    for kept in (OPEN_MEDIUM, OPEN_SMALL):
        for place in state.lists[kept].values():
            if place.used <= room and len(place.middles) == 1:
                return place
    if state.middles and state.middles[0][0] <= room:
        return None
    for place in state.lists[LOW_TINY].values():
        if place.used <= room:
            return place
    return None


def _highest(state: MellState, unit: PackingUnit, places: Iterable[Bin]) -> Bin | None:
    """Returns the bin with room and the highest priority; None if none has room."""
    room = state.capacity - unit.size
    source = origin_of(state, unit)
    best: Bin | None = None
    most = 0.0
    for place in places:
        if place.used <= room:
            rank = _rank(state, place, source)
            if best is None or rank > most:
                best, most = place, rank
    return best


def _fullest(state: MellState, unit: PackingUnit, places: Iterable[Bin]) -> Bin | None:
    """Returns the bin with room and the least of it.

    The unit's own former bin is preferred if it has room.
    """
    room = state.capacity - unit.size
    source = origin_of(state, unit)
    best: Bin | None = None
    for place in places:
        if place.used <= room:
            if place.number == source:
                return place
            if best is None or place.used > best.used:
                best = place
    return best


def _rank(state: MellState, place: Bin, source: int) -> float:
    """Returns the priority of a bin. The bin where the unit was before is above all others."""
    if place.number == source:
        return 1e18
    idle = (state.capacity - place.used) / state.capacity
    return priority(state.config, place.requests, idle, source, place.number)
