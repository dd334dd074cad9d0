"""What packing moves: units (a request, or a group of minute ones) on bins (GPUs)."""

from __future__ import annotations

from catenary_scheduler.packing.mell.sizes import LARGE, MEDIUM, TINY
from catenary_scheduler.packing.moves import Item


class PackingUnit:
    """A request of more than C/8, or a group (multi-item) of requests of at most C/8 each.

    Attributes:
        serial: Orders units of the same size; never used twice.
        members: The requests and their sizes; one if it is no group.
        grouped: True for a group, whatever it holds at the moment.
        size: Of all members together.
        kind: Class of the size; a group is TINY.
        bin: Where it is; None while it has no place.
        filed: Size under which the state lists it among the S and M that could join an L; -1: not.
    """

    __slots__ = ("bin", "filed", "grouped", "kind", "members", "serial", "size")

    def __init__(self, serial: int, members: dict[Item, int], grouped: bool, kind: int) -> None:
        self.serial = serial
        self.members = members
        self.grouped = grouped
        self.size = sum(members.values())
        self.kind = kind
        self.bin: Bin | None = None
        self.filed = -1


class Bin:
    """A GPU with units on it.

    Attributes:
        number: Its name.
        used: Sum of the sizes of its units.
        requests: On it, members of groups counted one by one.
        large: Units of more than C/2; one unless it overflows at the moment.
        middles: S and M.
        tinies: T and groups.
        flags: Lists of the state it is on, as a bit mask.
        solo_size: Of its L, if it has an L and neither S nor M; else -1.
    """

    __slots__ = (
        "flags",
        "large",
        "middles",
        "number",
        "requests",
        "solo_size",
        "tinies",
        "used",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.used = 0
        self.requests = 0
        self.large: list[PackingUnit] = []
        self.middles: list[PackingUnit] = []
        self.tinies: list[PackingUnit] = []
        self.flags = 0
        self.solo_size = -1

    def kind(self) -> int:
        """Returns the class of its largest unit; 0 if it is empty."""
        if self.large:
            return LARGE
        if self.middles:
            most = 0
            for unit in self.middles:
                most = max(most, unit.kind)
            return most
        return TINY if self.tinies else 0

    def mediums(self) -> int:
        """Returns how many of its units are M."""
        count = 0
        for unit in self.middles:
            if unit.kind == MEDIUM:
                count += 1
        return count

    def of_kind(self, kind: int) -> list[PackingUnit]:
        """Returns the list that units of a class are on."""
        if kind == LARGE:
            return self.large
        return self.tinies if kind == TINY else self.middles

    def units(self) -> list[PackingUnit]:
        """Returns all units, large ones first."""
        return self.large + self.middles + self.tinies
