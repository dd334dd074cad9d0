"""Bins, units, and lists of the bins that need or offer something.

The lists are updated as units come and go, so that no operation walks over all bins.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import Final

from catenary_scheduler.packing.config import PackingConfig
from catenary_scheduler.packing.mell.sizes import MEDIUM, SMALL, TINY, is_well_filled, kind_of
from catenary_scheduler.packing.mell.units import Bin, PackingUnit
from catenary_scheduler.packing.moves import Item

OPEN_MEDIUM: Final = 0
"""List of M-bins with one M (P1 allows one such bin)."""
OPEN_SMALL: Final = 1
"""List of S-bins with fewer than three S (P2 allows one such bin)."""
LOW_TINY: Final = 2
"""List of T-bins that are less than 75 % full (P3 allows one such bin)."""
ROOMY_TINY: Final = 3
"""List of T-bins with room for the least T."""
ROOMY: Final = 4
"""List of L-bins and complete M-bins with room for the least T."""
POOR: Final = 5
"""List of L-bins and complete M-bins that are less than 75 % full (none while there are T-bins,
P5)."""
TINY_BINS: Final = 6
"""List of all T-bins, well-filled ones too: while there are any, no bin may stay poor (P5)."""
_LISTS: Final = 7


class MellState:
    """State of a pool: all units, all bins, and the lists that the rules use.

    Attributes:
        capacity: Capacity of a bin.
        most_bins: Largest number of bins that may be active at a time; -1 for any number.
        unit_of: The unit of every placed request.
        bins: All bins with units on them, and those that became empty in this operation, by number.
        lists: For each of the lists above, its bins by number.
        solos: (size of the L, number) of every L-bin without S and M, ascending.
        middles: (size, serial) of every S and M on an S- or M-bin, ascending.
        open_groups: Groups of at most C/8; at most one between operations.
        dirty: Bins that have changed and were not yet relieved.
        origins: Former bins of the requests that lost their place in this operation.
    """

    def __init__(self, capacity: int, most_bins: int, config: PackingConfig) -> None:
        self.capacity = capacity
        self.most_bins = most_bins
        self.config = config
        self.unit_of: dict[Item, PackingUnit] = {}
        self.bins: dict[int, Bin] = {}
        self.lists: list[dict[int, Bin]] = [{} for _ in range(_LISTS)]
        self.solos: list[tuple[int, int]] = []
        self.middles: list[tuple[int, int]] = []
        self.middle_units: dict[int, PackingUnit] = {}
        self.open_groups: dict[int, PackingUnit] = {}
        self.dirty: dict[int, Bin] = {}
        self.origins: dict[Item, int] = {}
        self._serial = 0
        self._emptied: dict[int, Bin] = {}
        self._given_back: list[int] = []
        """Heap of the numbers below `_numbers` that no bin has."""
        self._numbers = 0

    def active(self) -> int:
        """Returns the number of bins with units on them."""
        return len(self.bins) - len(self._emptied)

    def may_activate(self) -> bool:
        """Returns True if one more bin may be active."""
        return self.most_bins < 0 or self.active() < self.most_bins

    def new_unit(self, members: dict[Item, int], grouped: bool) -> PackingUnit:
        """Makes a unit of some requests. It has no place yet."""
        self._serial += 1
        kind = TINY if grouped else kind_of(sum(members.values()), self.capacity)
        unit = PackingUnit(self._serial, members, grouped, kind)
        for item in members:
            self.unit_of[item] = unit
        return unit

    def activate(self, preferred: int) -> Bin | None:
        """Returns an empty bin, `preferred` if that is empty; None if no more may be active."""
        if not self.may_activate():
            return None
        if preferred in self._emptied:
            return self._emptied[preferred]
        if self._given_back:
            number = heapq.heappop(self._given_back)
        elif self._emptied and self.most_bins >= 0 and self._numbers >= self.most_bins:
            return next(iter(self._emptied.values()))
        else:
            number = self._numbers
            self._numbers += 1
        return self._make(number)

    def ensure(self, number: int) -> Bin:
        """Returns the bin of a given number, made if it was not active."""
        found = self.bins.get(number)
        if found is not None:
            return found
        while self._numbers <= number:
            heapq.heappush(self._given_back, self._numbers)
            self._numbers += 1
        self._given_back.remove(number)
        heapq.heapify(self._given_back)
        return self._make(number)

    def close_empty(self) -> None:
        """Deactivates the bins without units."""
        for number in self._emptied:
            del self.bins[number]
            self.dirty.pop(number, None)
            heapq.heappush(self._given_back, number)
        self._emptied.clear()

    def put(self, unit: PackingUnit, target: Bin) -> None:
        """Puts a unit without a place on a bin, whether or not it fits."""
        unit.bin = target
        target.of_kind(unit.kind).append(unit)
        target.used += unit.size
        target.requests += len(unit.members)
        self._emptied.pop(target.number, None)
        self.changed(target)

    def take(self, unit: PackingUnit) -> Bin:
        """Takes a unit off its bin, records where its requests were, and returns the bin."""
        source = unit.bin
        assert source is not None, "a unit has one place"
        for item in unit.members:
            if item not in self.origins:
                self.origins[item] = source.number
        self.remove(unit)
        return source

    def remove(self, unit: PackingUnit) -> None:
        """Takes a unit off its bin without recording where its requests were."""
        source = unit.bin
        assert source is not None, "a unit has one place"
        unit.bin = None
        self._unfile(unit)
        source.of_kind(unit.kind).remove(unit)
        source.used -= unit.size
        source.requests -= len(unit.members)
        if not source.large and not source.middles and not source.tinies:
            self._emptied[source.number] = source
        self.changed(source)

    def resize(self, unit: PackingUnit, size: int) -> None:
        """Sets the size and class of a unit, whether or not it fits, and marks its bin as dirty."""
        kind = TINY if unit.grouped else kind_of(size, self.capacity)
        place = unit.bin
        if place is None:
            unit.size, unit.kind = size, kind
            return
        place.used += size - unit.size
        unit.size = size
        if kind != unit.kind:
            place.of_kind(unit.kind).remove(unit)
            unit.kind = kind
            place.of_kind(kind).append(unit)
        self.dirty[place.number] = place

    def changed(self, place: Bin) -> None:
        """Marks a bin as dirty and puts it on the lists where it now belongs."""
        self.dirty[place.number] = place
        self.file(place)

    def file(self, place: Bin) -> None:
        """Puts a bin on the lists where it now belongs, and removes it from the others."""
        flags = self._flags(place)
        differing = flags ^ place.flags
        if differing:
            place.flags = flags
            for number in range(_LISTS):
                if differing >> number & 1:
                    if flags >> number & 1:
                        self.lists[number][place.number] = place
                    else:
                        del self.lists[number][place.number]
        self._file_solo(place)
        for unit in place.large:
            self._unfile(unit)
        for unit in place.tinies:
            self._unfile(unit)
        for unit in place.middles:
            self._file_middle(unit, not place.large)

    def _file_solo(self, place: Bin) -> None:
        solo = place.large[0].size if place.large and not place.middles else -1
        if solo == place.solo_size:
            return
        if place.solo_size >= 0:
            del self.solos[bisect_left(self.solos, (place.solo_size, place.number))]
        if solo >= 0:
            insort(self.solos, (solo, place.number))
        place.solo_size = solo

    def _file_middle(self, unit: PackingUnit, could_join: bool) -> None:
        if unit.filed == (unit.size if could_join else -1):
            return
        self._unfile(unit)
        if could_join:
            insort(self.middles, (unit.size, unit.serial))
            self.middle_units[unit.serial] = unit
            unit.filed = unit.size

    def _flags(self, place: Bin) -> int:
        kind, capacity = place.kind(), self.capacity
        if kind == 0:
            return 0
        full = is_well_filled(place.used, capacity)
        has_room = 8 * (capacity - place.used) > capacity
        if kind == TINY:
            flags = 1 << TINY_BINS
            if not full:
                flags |= 1 << LOW_TINY
            return flags | 1 << ROOMY_TINY if has_room else flags
        if kind == SMALL:
            return 1 << OPEN_SMALL if len(place.middles) < 3 else 0
        if kind == MEDIUM and place.mediums() < 2:
            return 1 << OPEN_MEDIUM
        flags = 0 if full else 1 << POOR
        return flags | 1 << ROOMY if has_room else flags

    def _make(self, number: int) -> Bin:
        made = Bin(number)
        self.bins[number] = self._emptied[number] = made
        return made

    def _unfile(self, unit: PackingUnit) -> None:
        if unit.filed >= 0:
            del self.middles[bisect_left(self.middles, (unit.filed, unit.serial))]
            del self.middle_units[unit.serial]
            unit.filed = -1
