"""Bins with their sessions, ordered by load, on which the plain policies are built."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence

from catenary_scheduler.packing.moves import Item
from catenary_services.errors import InvalidInput


class ActiveBins:
    """A set of active GPUs of one capacity, each with its sessions.

    A GPU is found by load in O(log bins). A new GPU gets the least number that is not in use.

    Args:
        capacity: Capacity of each GPU, in the unit of the sizes.
        most_bins: Largest number of GPUs that may be active at a time; None for any number.
    """

    def __init__(self, capacity: int, most_bins: int | None = None) -> None:
        if capacity <= 0:
            raise InvalidInput("capacity", "must be positive")
        self.capacity = capacity
        self._most_bins = most_bins
        self._bin_of: dict[Item, int] = {}
        self._sizes: dict[Item, int] = {}
        self._items: dict[int, dict[Item, None]] = {}
        self._loads: dict[int, int] = {}
        self._by_load: list[tuple[int, int]] = []
        """Pairs (load, gpu) of all active GPUs, ascending."""
        self._closed: list[int] = []
        """Heap of numbers that were given back. All others below `_names` are active."""
        self._names = 0

    def __contains__(self, item: Item) -> bool:
        return item in self._bin_of

    def __len__(self) -> int:
        return len(self._loads)

    def bin_of(self, item: Item) -> int | None:
        """Returns the GPU of a session; None if it is on none."""
        return self._bin_of.get(item)

    def size_of(self, item: Item) -> int:
        """Returns the memory that a session holds, in the unit of the capacity."""
        return self._sizes[item]

    def load_of(self, gpu: int) -> int:
        """Returns the sum of the sizes of a GPU's sessions."""
        return self._loads[gpu]

    def loads(self) -> Mapping[int, int]:
        return self._loads

    def count_of(self, gpu: int) -> int:
        return len(self._items[gpu])

    def sessions(self) -> int:
        """Returns the number of sessions on all GPUs."""
        return len(self._bin_of)

    def items_of(self, gpu: int) -> Sequence[Item]:
        """Returns the sessions of a GPU in the order in which they came to it."""
        return tuple(self._items[gpu])

    def bins(self) -> dict[int, tuple[Item, ...]]:
        """Returns the sessions of every GPU that has any, in the order of the GPUs' numbers."""
        return {gpu: tuple(self._items[gpu]) for gpu in sorted(self._items) if self._items[gpu]}

    def put(self, item: Item, size: int, gpu: int) -> None:
        """Puts a session on an active GPU, whether or not it fits."""
        assert item not in self._bin_of, "a session is on one gpu"
        self._bin_of[item] = gpu
        self._sizes[item] = size
        self._items[gpu][item] = None
        self._load(gpu, size)

    def take(self, item: Item) -> tuple[int, int]:
        """Removes a session. Returns its GPU, which may now be empty, and its size."""
        gpu, size = self._bin_of.pop(item), self._sizes.pop(item)
        del self._items[gpu][item]
        self._load(gpu, -size)
        return gpu, size

    def resize(self, sizes: Mapping[Item, int]) -> None:
        """Sets the sizes of the sessions that are on a GPU, even if it then overflows."""
        for item, size in sizes.items():
            gpu = self._bin_of.get(item)
            if gpu is not None:
                self._loads[gpu] += size - self._sizes[item]
                self._sizes[item] = size
        self._by_load = sorted((load, gpu) for gpu, load in self._loads.items())

    def resize_one(self, item: Item, size: int) -> None:
        """Sets the size of a placed session. For few sessions this is faster than `resize`."""
        more = size - self._sizes[item]
        self._sizes[item] = size
        self._load(self._bin_of[item], more)

    def best_fit(self, size: int) -> int | None:
        """Returns the fullest GPU that has room for `size`; None if there is none."""
        at = bisect_right(self._by_load, (self.capacity - size, self._names))
        return self._by_load[at - 1][1] if at else None

    def emptiest(self, count: int) -> list[int]:
        """Returns up to `count` active GPUs with the least loads, ascending."""
        return [gpu for _, gpu in self._by_load[:count]]

    def overflowing(self) -> list[int]:
        """Returns the GPUs whose load exceeds the capacity, the fullest last."""
        at = bisect_right(self._by_load, (self.capacity, self._names))
        return [gpu for _, gpu in self._by_load[at:]]

    def activate(self) -> int | None:
        """Activates an empty GPU and returns its number; None if no more may be active."""
        if self._most_bins is not None and len(self._loads) >= self._most_bins:
            return None
        if self._closed:
            return self._open(heapq.heappop(self._closed))
        self._names += 1
        return self._open(self._names - 1)

    def ensure(self, gpu: int) -> None:
        """Activates the GPU of a given number, if it is not active yet."""
        while self._names <= gpu:
            heapq.heappush(self._closed, self._names)
            self._names += 1
        if gpu not in self._loads:
            self._closed.remove(gpu)
            heapq.heapify(self._closed)
            self._open(gpu)

    def close_empty(self) -> None:
        """Deactivates the GPUs without sessions."""
        for gpu in [gpu for gpu, items in self._items.items() if not items]:
            del self._by_load[bisect_left(self._by_load, (self._loads.pop(gpu), gpu))]
            del self._items[gpu]
            heapq.heappush(self._closed, gpu)

    def _open(self, gpu: int) -> int:
        self._items[gpu] = {}
        self._loads[gpu] = 0
        insort(self._by_load, (0, gpu))
        return gpu

    def _load(self, gpu: int, more: int) -> None:
        load = self._loads[gpu]
        del self._by_load[bisect_left(self._by_load, (load, gpu))]
        self._loads[gpu] = load + more
        insort(self._by_load, (load + more, gpu))
