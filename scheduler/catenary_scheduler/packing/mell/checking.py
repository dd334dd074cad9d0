"""Test of a state for Mell's properties (Theorem 1), without using the state's lists.

The properties allow exceptions: one M-bin with one M, one S-bin with fewer than three S, one T-bin
below 75 %, one open group. A pool at its limit of bins is also excused where a repair would need
one more.
"""

from __future__ import annotations

from catenary_scheduler.packing.mell.sizes import (
    KIND_LETTERS,
    LARGE,
    MEDIUM,
    SMALL,
    TINY,
    is_minute,
    is_well_filled,
    kind_of,
)
from catenary_scheduler.packing.mell.state import MellState
from catenary_scheduler.packing.mell.units import Bin, PackingUnit


def violations(state: MellState) -> list[str]:
    """Returns one sentence for each property that is broken; none if all of them hold.

    Time: O(requests + L-bins x S- and M-bins).
    """
    wrong: list[str] = []
    found = [place for place in state.bins.values() if place.kind()]
    for place in found:
        wrong += _capacity(state, place)
        wrong += _mix(place)
    wrong += _groups(state, found)
    for name, count in _exceptions(state, found).items():
        if count > 1:
            wrong.append(f"{count} {name}")
    wrong += _pairing(state, found)
    if any(place.kind() == TINY for place in found):
        for place in found:
            complete = place.kind() == LARGE or (place.kind() == MEDIUM and place.mediums() == 2)
            if complete and not is_well_filled(place.used, state.capacity):
                wrong.append(f"P5: bin {place.number} is below 75 % while there are T-bins")
    if state.most_bins >= 0 and len(found) > state.most_bins:
        wrong.append(f"{len(found)} bins of at most {state.most_bins}")
    return wrong


def _capacity(state: MellState, place: Bin) -> list[str]:
    wrong = []
    units = place.units()
    if place.used != sum(unit.size for unit in units):
        wrong.append(f"bin {place.number} has lost count")
    if place.used > state.capacity:
        wrong.append(f"bin {place.number} holds {place.used} of {state.capacity}")
    if place.requests != sum(len(unit.members) for unit in units):
        wrong.append(f"bin {place.number} has lost count of its requests")
    for kind, lot in ((LARGE, place.large), (TINY, place.tinies)):
        if any(unit.kind != kind for unit in lot):
            wrong.append(f"bin {place.number} has a unit of another class than {kind}")
    for unit in units:
        if unit.bin is not place:
            wrong.append(f"unit {unit.serial} is on bin {place.number} and elsewhere")
        wrong += _unit(state, unit)
    return wrong


def _unit(state: MellState, unit: PackingUnit) -> list[str]:
    wrong = []
    if unit.size != sum(unit.members.values()) or not unit.members:
        wrong.append(f"unit {unit.serial} has lost count")
    if any(state.unit_of.get(item) is not unit for item in unit.members):
        wrong.append(f"unit {unit.serial} has a member that is elsewhere")
    if unit.grouped:
        if 4 * unit.size > state.capacity:
            wrong.append(f"group {unit.serial} is larger than C/4")
        if not all(is_minute(size, state.capacity) for size in unit.members.values()):
            wrong.append(f"group {unit.serial} has a member larger than C/8")
    elif is_minute(unit.size, state.capacity):
        wrong.append(f"unit {unit.serial} should be in a group")
    elif unit.kind != kind_of(unit.size, state.capacity):
        wrong.append(f"unit {unit.serial} is of another class than {KIND_LETTERS[unit.kind]}")
    return wrong


def _mix(place: Bin) -> list[str]:
    """Checks the parts of P1 and P2 that say which units may be together on a bin."""
    count = dict.fromkeys((TINY, SMALL, MEDIUM, LARGE), 0)
    for unit in place.units():
        count[unit.kind] += 1
    middles = count[SMALL] + count[MEDIUM]
    if count[LARGE]:
        fine = count[LARGE] == 1 and middles <= 1
    elif count[MEDIUM]:
        fine = count[MEDIUM] <= 2 and not count[SMALL]
    elif count[SMALL]:
        fine = count[SMALL] <= 3 and not count[TINY]
    else:
        fine = True
    return [] if fine else [f"P1, P2: bin {place.number} mixes what may not be together"]


def _groups(state: MellState, found: list[Bin]) -> list[str]:
    opened = [
        unit
        for place in found
        for unit in place.tinies
        if unit.grouped and is_minute(unit.size, state.capacity)
    ]
    wrong = []
    if len(opened) > 1 and state.may_activate():
        wrong.append(f"{len(opened)} open groups")
    if {unit.serial for unit in opened} != set(state.open_groups):
        wrong.append("open groups are not listed")
    return wrong


def _exceptions(state: MellState, found: list[Bin]) -> dict[str, int]:
    """Counts the bins that P1-P3 allow as exceptions, of which there may be one of each kind."""
    mediums = [place for place in found if place.kind() == MEDIUM and place.mediums() < 2]
    smalls = [place for place in found if place.kind() == SMALL and len(place.middles) < 3]
    tinies = [
        place
        for place in found
        if place.kind() == TINY and not is_well_filled(place.used, state.capacity)
    ]
    blocked = not state.may_activate() and all(place.tinies for place in mediums)
    return {
        "M-bins with one M (P1)": 1 if blocked else len(mediums),
        "S-bins with fewer than three S (P2)": len(smalls),
        "T-bins below 75 % (P3)": len(tinies),
    }


def _pairing(state: MellState, found: list[Bin]) -> list[str]:
    middles = [unit for place in found if place.kind() in (SMALL, MEDIUM) for unit in place.middles]
    wrong = []
    for place in found:
        if place.kind() != LARGE or place.middles:
            continue
        for unit in middles:
            fits = place.large[0].size + unit.size <= state.capacity
            excused = place.used + unit.size > state.capacity and not state.may_activate()
            if fits and not excused:
                wrong.append(f"P4: unit {unit.serial} fits beside the L on bin {place.number}")
                break
    return wrong
