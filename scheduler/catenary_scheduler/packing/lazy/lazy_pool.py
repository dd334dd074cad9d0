"""Lazy packing: Mell's aim and bound with few moves, without its classes (`pack`, as it runs live).

Mell's rules keep P1-P5 at every moment, so a session moves whenever it crosses a border of its
class. That happens two to four times in its life and moves others too, and most of these moves save
no GPU. Here a session moves for two reasons only: its bin overflows, or its bin can be emptied.
Both look ahead at the pace of growth, so that a move lasts. What Mell proves about the number of
bins is checked instead: if there are ever more than 4/3 of the lower bound plus 3, Mell's own rules
repair that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from catenary_scheduler.packing.active_bins import ActiveBins
from catenary_scheduler.packing.bound import bound_on_bins, least_bins, restoring_moves
from catenary_scheduler.packing.config import PackingConfig
from catenary_scheduler.packing.lazy.bin_forecast import BinForecast, LazyRules
from catenary_scheduler.packing.lazy.lazy_moving import LazyMover
from catenary_scheduler.packing.moves import EpochResult, Item, PackingMove
from catenary_scheduler.packing.validating import check_epoch, check_size
from catenary_services.errors import InvalidInput

_LEAST_NAMED = 16
"""An epoch teaches how fast sessions grow only if it names at least one in this many of them."""


class LazyPool:
    """A pool that keeps sessions on few bins with few moves; a `PackingPolicy`, as `MellPool` is.

    Args:
        capacity: Capacity of a bin, in the unit of the sizes.
        most_bins: Largest number of bins that may be active at a time; None for any number.
        config: Distances between bins.
        rules: Thresholds that decide when a move is worth its cost.
    """

    def __init__(
        self,
        capacity: int,
        *,
        most_bins: int | None = None,
        config: PackingConfig | None = None,
        rules: LazyRules | None = None,
    ) -> None:
        if capacity <= 0:
            raise InvalidInput("capacity", "must be positive")
        self._capacity = capacity
        self._most_bins = most_bins
        self._config = config or PackingConfig()
        self._rules = rules or LazyRules()
        self._active_bins = ActiveBins(capacity, most_bins)
        self._forecast = BinForecast(capacity, self._rules)
        self._total = 0
        self._waiting: dict[Item, int] = {}
        """Sizes of queued sessions, in the order of the queue."""
        distance = self._config.distance if self._config.distance_weight else None
        self._mover = LazyMover(self._active_bins, self._forecast, self._rules, distance)
        self.repairs = 0
        """Number of times that Mell's rules had to restore the bound."""

    def epoch(
        self, departed: Iterable[Item], sizes: Mapping[Item, int], arrived: Mapping[Item, int]
    ) -> EpochResult:
        """Applies everything that happened since the last epoch, as `MellPool.epoch` does.

        Returns what changes.

        Raises:
            InvalidInput: A session does not fit a bin, is not known, or is known already; nothing
                has changed then.
        """
        gone = list(departed)
        check_epoch(gone, sizes, arrived, self._knows, self._capacity)
        for item in gone:
            self._forget(item)
        self._active_bins.close_empty()
        self._resize(sizes)
        origins: dict[Item, int] = {}
        preempted = self._relieve(origins)
        placed = set(preempted) | self._waiting.keys()
        self._waiting = {**preempted, **self._waiting, **self._in_order(arrived)}
        placed.update(arrived)
        self._place_waiting()
        self._empty_bins(origins)
        self._keep_bound(origins)
        return self._result(origins, placed, preempted)

    def place(self, item: Item, size: int, number: int) -> None:
        """Adopts a session that another component has put on a bin, new or known.

        The bin may overflow; the next epoch relieves it.

        Raises:
            InvalidInput: The session does not fit a bin.
        """
        check_size("size", size, self._capacity)
        if item in self._active_bins or item in self._waiting:
            self._forget(item)
        self._active_bins.ensure(number)
        self._put(item, size, number)

    def bin_for(self, size: int) -> int | None:
        """Returns the bin on which a new session of a size would be put now; None for a new bin."""
        return self._mover.arrival(size)

    def bin_of(self, item: Item) -> int | None:
        """Returns the bin of a session; None if it is queued or unknown."""
        return self._active_bins.bin_of(item)

    def size_of(self, item: Item) -> int:
        """Returns the memory that a placed session holds, in the unit of the capacity."""
        return self._active_bins.size_of(item)

    def bins(self) -> Mapping[int, Sequence[Item]]:
        """Returns the active bins and the sessions on each of them."""
        return {gpu: items for gpu, items in self._active_bins.bins().items() if items}

    def queued(self) -> tuple[Item, ...]:
        """Returns the sessions that wait, in the order of their turns."""
        return tuple(self._waiting)

    def check(self) -> list[str]:
        """Returns one sentence for each thing that is wrong; none after any epoch."""
        loads = self._active_bins.loads()
        wrong = [
            f"bin {gpu} holds {load} of {self._capacity}"
            for gpu, load in loads.items()
            if load > self._capacity
        ]
        used, most = (
            sum(1 for load in loads.values() if load),
            bound_on_bins(least_bins(self._active_bins)),
        )
        if used > most:
            wrong.append(f"{used} bins, where Mell promises at most {most}")
        if self._most_bins is not None and used > self._most_bins:
            wrong.append(f"{used} bins of at most {self._most_bins}")
        if self._total != sum(loads.values()):
            wrong.append("the total has lost count")
        return wrong

    def _knows(self, item: Item) -> bool:
        return item in self._active_bins or item in self._waiting

    def _forget(self, item: Item) -> None:
        if item in self._waiting:
            del self._waiting[item]
        else:
            self._total -= self._active_bins.take(item)[1]

    def _put(self, item: Item, size: int, gpu: int) -> None:
        self._active_bins.put(item, size, gpu)
        self._total += size

    def _resize(self, sizes: Mapping[Item, int]) -> None:
        active_bins = self._active_bins
        changed: dict[Item, int] = {}
        grown = 0
        for item, size in sizes.items():
            if item in active_bins:
                more = size - active_bins.size_of(item)
                if more:
                    changed[item] = size
                    grown += more
            elif item in self._waiting:
                self._waiting[item] = size
        if 8 * len(changed) < len(active_bins):
            for item, size in changed.items():
                active_bins.resize_one(item, size)
        else:
            active_bins.resize(changed)
        self._total += grown
        if _LEAST_NAMED * len(sizes) >= active_bins.sessions():
            self._forecast.learn(grown, active_bins.sessions())

    def _relieve(self, origins: dict[Item, int]) -> dict[Item, int]:
        """Moves sessions off overflowing bins.

        Returns the sizes of those that lost their place because no bin had room.
        """
        active_bins = self._active_bins
        preempted: dict[Item, int] = {}
        for gpu in reversed(active_bins.overflowing()):
            while active_bins.load_of(gpu) > self._capacity:
                move = self._mover.relief(gpu)
                if move is None:
                    item = self._mover.leaving(gpu)
                    target = active_bins.activate()
                    if target is None:
                        preempted[item] = active_bins.take(item)[1]
                        self._total -= preempted[item]
                        continue
                    move = PackingMove(item, gpu, target, active_bins.size_of(item))
                self._move(move, origins)
        return preempted

    def _in_order(self, arrived: Mapping[Item, int]) -> dict[Item, int]:
        """Returns arrivals, the large ones first; in their own order if some may have to wait."""
        if self._most_bins is not None:
            return dict(arrived)
        return dict(sorted(arrived.items(), key=lambda entry: -entry[1]))

    def _place_waiting(self) -> None:
        queue = deque(self._waiting.items())
        while queue:
            item, size = queue[0]
            gpu = self._mover.arrival(size)
            if gpu is None:
                gpu = self._active_bins.activate()
            if gpu is None:
                break
            queue.popleft()
            self._put(item, size, gpu)
        self._waiting = dict(queue)

    def _empty_bins(self, origins: dict[Item, int]) -> None:
        """Empties bins while that is worth its cost, and deactivates them."""
        active_bins = self._active_bins
        left = max(self._rules.most_emptied, len(active_bins) // 8)
        active_bins.close_empty()
        while moves := self._mover.emptying(left):
            for move in moves:
                self._move(move, origins)
            left -= len(moves)
            active_bins.close_empty()

    def _move(self, move: PackingMove, origins: dict[Item, int]) -> None:
        origins.setdefault(move.item, move.source)
        self._active_bins.take(move.item)
        self._active_bins.put(move.item, move.size, move.target)

    def _keep_bound(self, origins: dict[Item, int]) -> None:
        """Repacks by Mell's rules, from the present state, if there are too many bins."""
        active_bins = self._active_bins
        moves = restoring_moves(active_bins, self._total, self._most_bins, self._config)
        if moves:
            self.repairs += 1
            for move in moves:
                active_bins.ensure(move.target)
                self._move(move, origins)
            active_bins.close_empty()

    def _result(
        self, origins: Mapping[Item, int], placed: set[Item], preempted: Mapping[Item, int]
    ) -> EpochResult:
        active_bins = self._active_bins
        moves = []
        for item, source in origins.items():
            target = active_bins.bin_of(item)
            if target is not None and target != source and item not in placed:
                moves.append(PackingMove(item, source, target, active_bins.size_of(item)))
        there = {}
        for item in placed:
            target = active_bins.bin_of(item)
            if target is not None:
                there[item] = target
        return EpochResult(tuple(moves), there, tuple(self._waiting), tuple(preempted))
