"""Groups of minute requests: joining, splitting and merging (completion G12).

A request of at most C/8 is packed in a group of (C/8, C/4] that counts as one T. At most one group
is open, that is of at most C/8; arrivals join it.
"""

from __future__ import annotations

from catenary_scheduler.packing.mell.sizes import is_minute
from catenary_scheduler.packing.mell.state import MellState
from catenary_scheduler.packing.mell.units import PackingUnit
from catenary_scheduler.packing.moves import Item


def normalise(state: MellState, group: PackingUnit) -> None:
    """Restores a group after its members have changed: dissolves, opens, closes or splits it.

    Time: O(members log members) if the group has to be split.
    """
    if not group.members:
        if group.bin is not None:
            state.remove(group)
        state.open_groups.pop(group.serial, None)
        return
    while 4 * group.size > state.capacity:
        _detach(state, group, _part(group, state.capacity))
    if is_minute(group.size, state.capacity):
        state.open_groups[group.serial] = group
    else:
        state.open_groups.pop(group.serial, None)


def drop_member(state: MellState, group: PackingUnit, item: Item) -> None:
    """Removes a request from a group. The caller decides where the request goes."""
    size = group.members.pop(item)
    if group.bin is not None:
        group.bin.requests -= 1
    state.resize(group, group.size - size)


def add_member(state: MellState, group: PackingUnit, item: Item, size: int) -> None:
    """Adds a request to a group. The caller must normalise the group afterwards."""
    group.members[item] = size
    state.unit_of[item] = group
    if group.bin is not None:
        group.bin.requests += 1
    state.resize(group, group.size + size)


def move_out(state: MellState, group: PackingUnit, item: Item, grouped: bool) -> PackingUnit:
    """Turns a member of a group into a unit of its own on the same bin, and returns that unit."""
    size = group.members[item]
    drop_member(state, group, item)
    unit = state.new_unit({item: size}, grouped)
    if group.bin is not None:
        state.put(unit, group.bin)
    return unit


def merge_open(state: MellState, homeless: list[PackingUnit]) -> bool:
    """Merges the two smallest open groups; the smaller one moves if the other's bin has room.

    Args:
        state: The state to change.
        homeless: Units without a place, to which a merged group that fits neither bin is added.

    Returns:
        True if two groups were merged.
    """
    if len(state.open_groups) < 2:
        return False
    groups = sorted(state.open_groups.values(), key=_by_size)
    less, more = groups[0], groups[1]
    if not _has_room(state, more, less) and _has_room(state, less, more):
        less, more = more, less
    if more.bin is not None and not _has_room(state, more, less):
        if not state.may_activate():
            return False
        state.take(more)
        homeless.append(more)
    if less.bin is None:
        homeless.remove(less)
    elif less.bin is not more.bin:
        state.take(less)
    else:
        state.remove(less)
    del state.open_groups[less.serial]
    for item, size in less.members.items():
        add_member(state, more, item, size)
    normalise(state, more)
    return True


def _has_room(state: MellState, group: PackingUnit, other: PackingUnit) -> bool:
    """Returns True if the other group's members could join a group where that is."""
    if group.bin is None:
        return False
    return group.bin is other.bin or group.bin.used + other.size <= state.capacity


def _by_size(unit: PackingUnit) -> tuple[int, int]:
    return unit.size, unit.serial


def _part(group: PackingUnit, capacity: int) -> list[Item]:
    """Returns the members to split off: together more than C/8, if more than C/8 is left.

    Otherwise it is the smallest single member without which the group fits into C/4.
    """
    ordered = sorted(group.members.items(), key=lambda entry: entry[1])
    part: list[Item] = []
    total = 0
    for item, size in reversed(ordered):
        part.append(item)
        total += size
        if not is_minute(total, capacity):
            break
    if not is_minute(group.size - total, capacity):
        return part
    for item, size in ordered:
        if 4 * (group.size - size) <= capacity:
            return [item]
    return part


def _detach(state: MellState, group: PackingUnit, items: list[Item]) -> None:
    """Turns members of a group into a group of their own on the same bin."""
    rest = move_out(state, group, items[0], grouped=True)
    for item in items[1:]:
        size = group.members[item]
        drop_member(state, group, item)
        add_member(state, rest, item, size)
    normalise(state, rest)
