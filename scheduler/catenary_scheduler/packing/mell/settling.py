"""Repair loop that brings a state back to properties P1-P5 after any change."""

from __future__ import annotations

from catenary_scheduler.packing.mell.grouping import merge_open
from catenary_scheduler.packing.mell.placing import place
from catenary_scheduler.packing.mell.repairing import (
    merge_mediums,
    merge_smalls,
    merge_tinies,
    pair,
    relieve,
    top_up,
)
from catenary_scheduler.packing.mell.state import MellState
from catenary_scheduler.packing.mell.units import PackingUnit

_STEPS_PER_UNIT = 20
"""Steps of repair per unit after which a loop without end is assumed. No repair has taken as
many."""


def evicted(state: MellState) -> list[PackingUnit]:
    """Returns the units that had to leave the bins that changed. Every bin fits afterwards."""
    homeless: list[PackingUnit] = []
    for changed in list(state.dirty.values()):
        state.file(changed)
    while state.dirty:
        relieve(state, state.dirty.popitem()[1], homeless)
    return homeless


def place_all(state: MellState, homeless: list[PackingUnit]) -> list[PackingUnit]:
    """Places units, the large ones first, and returns those for which there is no bin."""
    lost = []
    homeless.sort(key=_largest_first)
    for unit in homeless:
        if not place(state, unit):
            lost.append(unit)
    homeless.clear()
    return lost


def settle(state: MellState, homeless: list[PackingUnit]) -> list[PackingUnit]:
    """Places units and repairs until P1-P5 hold, except where `violations` allows more.

    Args:
        state: The state to change.
        homeless: Units without a place. The list is empty afterwards.

    Returns:
        The units for which there is no bin, because no more bins may be activated.
    """
    lost: list[PackingUnit] = []
    for _ in range(_STEPS_PER_UNIT * (len(state.unit_of) + 1)):
        homeless.extend(evicted(state))
        if merge_open(state, homeless):
            continue
        if homeless:
            lost.extend(place_all(state, homeless))
            continue
        if not _repair(state):
            return lost
    raise AssertionError("a repair that has no end")


def _repair(state: MellState) -> bool:
    """Makes one step against a property that fails. Returns False if none fails."""
    return (
        pair(state)
        or merge_mediums(state)
        or merge_smalls(state)
        or top_up(state)
        or merge_tinies(state)
    )


def _largest_first(unit: PackingUnit) -> tuple[int, int]:
    return -unit.size, unit.serial
