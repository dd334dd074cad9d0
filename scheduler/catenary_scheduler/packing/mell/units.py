"""Units of packing (a request, or a group of minute ones) and the bins (GPUs) that hold them."""

from __future__ import annotations

from catenary_scheduler.packing.mell.sizes import LARGE, MEDIUM, TINY
from catenary_scheduler.packing.moves import Item


class PackingUnit:
    """A request of more than C/8, or a group (multi-item) of requests of at most C/8 each.

    Attributes:
        serial: Number that orders units of the same size; it is never used twice.
        members: The requests and their sizes; a single one unless this is a group.
        grouped: True for a group, whatever it holds at the moment.
        size: Sum of the sizes of all members.
        kind: Class of the size; a group is TINY.
        bin: The bin that holds it; None while it has no place.
        filed: Size under which the state lists it among the S and M that could join an L; -1 if it
            is not listed.
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
    """A GPU, and the units that are on it.

    Attributes:
        number: Number that identifies it.
        used: Sum of the sizes of its units.
        requests: Number of requests on it; members of groups count one by one.
        large: Units of more than C/2; at most one between operations.
        middles: Units of class S and M.
        tinies: Units of class T, and groups.
        flags: Bit mask of the lists of the state that it is on.
        solo_size: Size of its L, if it has one and neither S nor M; otherwise -1.
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
        """Returns the class of the bin's largest unit; 0 if it is empty."""
        if self.large:
            return LARGE
        if self.middles:
            most = 0
            for unit in self.middles:
                most = max(most, unit.kind)
            return most
        return TINY if self.tinies else 0

    def mediums(self) -> int:
        """Returns how many of the bin's units are of class M."""
        count = 0
        for unit in self.middles:
            if unit.kind == MEDIUM:
                count += 1
        return count

    def of_kind(self, kind: int) -> list[PackingUnit]:
        """Returns the list that holds units of a class."""
        if kind == LARGE:
            return self.large
        return self.tinies if kind == TINY else self.middles

    def units(self) -> list[PackingUnit]:
        """Returns all units of the bin, the large ones first."""
        return self.large + self.middles + self.tinies
