"""Depart and Update: rules that restore P1-P5 after sizes have changed and requests have left.

The rules of Mell's Fig. 10 are grouped by their purpose: each function finds one way in which a
property fails and makes one step against it. It includes completions G3-G8, G10 and G11.
"""

from __future__ import annotations

from bisect import bisect_right

from catenary_scheduler.packing.mell.placing import in_the_way
from catenary_scheduler.packing.mell.sizes import MEDIUM, is_well_filled
from catenary_scheduler.packing.mell.state import (
    LOW_TINY,
    OPEN_MEDIUM,
    OPEN_SMALL,
    POOR,
    TINY_BINS,
    MellState,
)
from catenary_scheduler.packing.mell.units import Bin, PackingUnit


def relieve(state: MellState, place: Bin, homeless: list[PackingUnit]) -> None:
    """Removes the units that overflow a bin or may not be together, as few as possible.

    Args:
        state: The state to change.
        place: A bin that has changed.
        homeless: Units without a place, to which the removed ones are added.
    """
    while len(place.large) > 1:
        _evict(state, min(place.large, key=_by_size), homeless)
    if place.large:
        _keep_one_beside(state, place, homeless)
    elif place.middles:
        _keep_of_a_kind(state, place, homeless)
    while place.used > state.capacity:
        _evict(state, sufficient(place.tinies, place.used - state.capacity), homeless)


def sufficient(units: list[PackingUnit], wanted: int) -> PackingUnit:
    """Returns the smallest unit of at least size `wanted`, or the largest if there is none (G8)."""
    best = units[0]
    for unit in units:
        if best.size < wanted:
            if unit.size > best.size:
                best = unit
        elif wanted <= unit.size < best.size:
            best = unit
    return best


def pair(state: MellState) -> bool:
    """Moves one S or M beside an L that has none, if one fits (P4). Returns True if it did."""
    if not state.solos or not state.middles:
        return False
    least = state.middles[0][0]
    for size, number in state.solos:
        if size + least > state.capacity:
            return False
        place = state.bins[number]
        unit = _partner(state, place)
        if unit is not None:
            state.take(unit)
            state.put(unit, place)
            return True
    return False


def merge_mediums(state: MellState) -> bool:
    """Makes one complete M-bin of two that lack an M each (P1). Returns True if it did."""
    places = state.lists[OPEN_MEDIUM]
    if len(places) < 2:
        return False
    ordered = sorted(places.values(), key=lambda place: (len(place.tinies), place.used))
    # The M leaves the bin that becomes empty. If both have T, it leaves the one with more of them.
    donor, target = ordered[0], ordered[1]
    if donor.tinies or in_the_way(state, donor.middles[0], target) > len(target.tinies) // 2:
        donor, target = target, donor
    if donor.tinies and in_the_way(state, donor.middles[0], target) and not state.may_activate():
        return False
    unit = donor.middles[0]
    state.take(unit)
    state.put(unit, target)
    return True


def merge_smalls(state: MellState) -> bool:
    """Moves one S between two S-bins that lack some (P2). Returns True if it did."""
    places = state.lists[OPEN_SMALL]
    if len(places) < 2:
        return False
    ordered = sorted(places.values(), key=lambda place: (len(place.middles), place.used))
    unit = min(ordered[0].middles, key=_by_size)
    state.take(unit)
    state.put(unit, ordered[-1])
    return True


def top_up(state: MellState) -> bool:
    """Moves one T to an L- or complete M-bin below 75 % while there are T-bins (P5, G3).

    Returns True if it did.
    """
    if not state.lists[POOR] or not state.lists[TINY_BINS]:
        return False
    place = next(iter(state.lists[POOR].values()))
    donors = state.lists[LOW_TINY] or state.lists[TINY_BINS]
    donor = min(donors.values(), key=lambda each: (each.used, -each.number))
    _pull(state, donor, place)
    return True


def merge_tinies(state: MellState) -> bool:
    """Moves one T between two T-bins below 75 % (P3, G4, G10). Returns True if it did."""
    places = state.lists[LOW_TINY]
    if len(places) < 2:
        return False
    ordered = sorted(places.values(), key=lambda place: (place.used, place.number))
    _pull(state, ordered[0], ordered[-1])
    return True


def _pull(state: MellState, donor: Bin, place: Bin) -> None:
    """Moves the smallest T that fills a bin to 75 %, or the largest T if none does.

    Any of them fits.
    """
    lacking = -(-3 * state.capacity // 4) - place.used
    unit = sufficient(donor.tinies, lacking)
    assert place.used + unit.size <= state.capacity or is_well_filled(place.used, state.capacity)
    state.take(unit)
    state.put(unit, place)


def _evict(state: MellState, unit: PackingUnit, homeless: list[PackingUnit]) -> None:
    state.take(unit)
    homeless.append(unit)


def _keep_one_beside(state: MellState, place: Bin, homeless: list[PackingUnit]) -> None:
    """Evicts all S and M beside an L but the largest one that fits."""
    room = state.capacity - place.large[0].size
    kept: PackingUnit | None = None
    for unit in place.middles:
        if unit.size <= room and (kept is None or unit.size > kept.size):
            kept = unit
    for unit in list(place.middles):
        if unit is not kept:
            _evict(state, unit, homeless)


def _keep_of_a_kind(state: MellState, place: Bin, homeless: list[PackingUnit]) -> None:
    """Evicts units until two M with their T, or three S alone, are left.

    Of a mixed bin the fewer go.
    """
    mediums = [unit for unit in place.middles if unit.kind == MEDIUM]
    smalls = [unit for unit in place.middles if unit.kind != MEDIUM]
    if mediums and smalls:
        alone = len(mediums) == 1
        if alone and (len(smalls) > 1 or state.lists[OPEN_MEDIUM].keys() - {place.number}):
            leaving, mediums = mediums, []
        else:
            leaving, smalls = smalls, []
        for unit in leaving:
            _evict(state, unit, homeless)
    for unit in sorted(mediums, key=_by_size)[: max(0, len(mediums) - 2)]:
        _evict(state, unit, homeless)
    for unit in sorted(smalls, key=_by_size)[: max(0, len(smalls) - 3)]:
        _evict(state, unit, homeless)
    if smalls and place.tinies:
        # When one T has grown to S, that S goes and not the T beside it.
        fewer = place.tinies if len(place.tinies) < len(place.middles) else place.middles
        for unit in list(fewer):
            _evict(state, unit, homeless)


def _partner(state: MellState, place: Bin) -> PackingUnit | None:
    """Returns the S or M that should join an L-bin; None if none can.

    It is the one that makes the fewest others move, and of those a large one.

    At the limit of bins a unit is left out if T would have to leave that have nowhere to go.
    """
    room = state.capacity - place.solo_size
    candidates: list[PackingUnit] = []
    for kept in (OPEN_MEDIUM, OPEN_SMALL):
        for source in state.lists[kept].values():
            candidates += [unit for unit in source.middles if unit.size <= room]
    for limit in (room, state.capacity - place.used):
        at = bisect_right(state.middles, (limit, 1 << 62))
        if at:
            candidates.append(state.middle_units[state.middles[at - 1][1]])
    best: PackingUnit | None = None
    least = (0, 0, 0)
    for unit in candidates:
        leaving = in_the_way(state, unit, place)
        if not leaving or state.may_activate():
            others = _others(unit)
            cost = (leaving + (others >= 2), others, -unit.size)
            if best is None or cost < least:
                best, least = unit, cost
    return best


def _others(unit: PackingUnit) -> int:
    """Returns how many S or M are left behind.

    A complete M-bin counts one more, since it must be filled again.
    """
    source = unit.bin
    assert source is not None, "a unit that is listed has a place"
    return len(source.middles) - 1 + (unit.kind == MEDIUM)


def _by_size(unit: PackingUnit) -> tuple[int, int]:
    return unit.size, unit.serial
