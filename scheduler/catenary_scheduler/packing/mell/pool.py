"""Mell with its completions: sessions on as few GPUs as its rules find, with few moves.

Source: "Mell: Memory-Efficient Large Language Model Serving via Multi-GPU KV Cache Management",
sections VI and VII, with completions where its rules have gaps (see the package). One pool serves
GPUs of one capacity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from catenary_scheduler.packing.config import PackingConfig
from catenary_scheduler.packing.mell.checking import violations
from catenary_scheduler.packing.mell.grouping import add_member, drop_member, move_out, normalise
from catenary_scheduler.packing.mell.placing import place as place_unit
from catenary_scheduler.packing.mell.settling import evicted, place_all, settle
from catenary_scheduler.packing.mell.sizes import is_minute
from catenary_scheduler.packing.mell.state import MellState
from catenary_scheduler.packing.mell.units import PackingUnit
from catenary_scheduler.packing.moves import EpochResult, Item, PackingMove
from catenary_scheduler.packing.validating import check_epoch, check_size
from catenary_services.errors import InvalidInput


class MellPool:
    """A pool that keeps sessions on bins so that P1-P5 hold after every epoch.

    An epoch takes many of Mell's operations at once and makes fewer moves than one at a time would
    (operation batching). Sessions for which no bin may be activated wait in a queue, first come
    first served.

    Args:
        capacity: Capacity of a bin, in the unit of the sizes.
        most_bins: Largest number of bins that may be active at a time; None for any number.
        config: Weights for the choice among bins that would all do.
    """

    def __init__(
        self,
        capacity: int,
        *,
        most_bins: int | None = None,
        config: PackingConfig | None = None,
    ) -> None:
        if capacity <= 0:
            raise InvalidInput("capacity", "must be positive")
        limit = -1 if most_bins is None else most_bins
        self._state = MellState(capacity, limit, config or PackingConfig())
        self._waiting: dict[Item, int] = {}
        """Sizes of queued sessions, in the order of the queue."""
        self._item_moves = 0

    def epoch(
        self, departed: Iterable[Item], sizes: Mapping[Item, int], arrived: Mapping[Item, int]
    ) -> EpochResult:
        """Applies everything that happened since the last epoch, and returns what changes.

        Departures and updates come first, because they free room. Sessions that have to leave a bin
        and new ones then fill the holes, the large ones first, and one repair restores P1-P5. Only
        sessions that are elsewhere afterwards count as moved, so a move that another one makes
        useless never shows.

        Args:
            departed: Sessions that are over, placed or queued.
            sizes: Sizes that sessions will have at the end of the coming epoch (G14), placed or
                queued. A session that is missing keeps its size.
            arrived: Sizes that new sessions will have, in the order of their arrival.

        Raises:
            InvalidInput: A session does not fit a bin (G13), is not known, or is known already;
                nothing has changed then.
        """
        state = self._state
        gone = list(departed)
        check_epoch(gone, sizes, arrived, self._knows, state.capacity)
        state.origins.clear()
        for item in gone:
            self._forget(item)
        for item, size in sizes.items():
            if item in self._waiting:
                self._waiting[item] = size
            elif item in state.unit_of:
                self._resize(item, size)
        homeless = evicted(state)
        fresh = set(arrived)
        preempted: list[Item] = []
        if state.most_bins < 0:
            for item, size in arrived.items():
                self._admit(item, size, homeless)
        else:
            fresh.update(self._waiting)
            preempted += self._preempt(place_all(state, homeless))
            self._waiting.update(arrived)
            if not preempted:
                self._place_waiting()
        preempted += self._preempt(settle(state, homeless))
        while self._waiting and not preempted and self._place_waiting():
            preempted += self._preempt(settle(state, []))
        state.close_empty()
        return self._result(fresh, [item for item in preempted if item not in fresh])

    def place(self, item: Item, size: int, number: int) -> None:
        """Adopts a session that another component has put on a bin, new or known.

        This may break any property and overflow the bin; the next epoch repairs that.

        Raises:
            InvalidInput: The session does not fit a bin.
        """
        state = self._state
        check_size("size", size, state.capacity)
        if self._knows(item):
            self._forget(item)
        target = state.ensure(number)
        if is_minute(size, state.capacity):
            for group in target.tinies:
                if group.grouped and 4 * (group.size + size) <= state.capacity:
                    add_member(state, group, item, size)
                    normalise(state, group)
                    return
        unit = state.new_unit({item: size}, is_minute(size, state.capacity))
        state.put(unit, target)
        if unit.grouped:
            normalise(state, unit)

    def bin_of(self, item: Item) -> int | None:
        """Returns the number of a session's bin; None if it is queued or unknown."""
        unit = self._state.unit_of.get(item)
        return None if unit is None or unit.bin is None else unit.bin.number

    def size_of(self, item: Item) -> int:
        """Returns the memory that a placed session holds, in the unit of the capacity."""
        return self._state.unit_of[item].members[item]

    def bins(self) -> Mapping[int, Sequence[Item]]:
        """Returns the active bins and their sessions, in the order of their activation."""
        return {
            number: tuple(item for unit in place.units() for item in unit.members)
            for number, place in self._state.bins.items()
            if place.kind()
        }

    def queued(self) -> tuple[Item, ...]:
        """Returns the sessions that wait, in the order of their turns."""
        return tuple(self._waiting)

    @property
    def item_moves(self) -> int:
        """Number of moves in the last operation; a group that moved counts once (Theorem 3)."""
        return self._item_moves

    def check(self) -> list[str]:
        """Returns one sentence for each property that does not hold; none after any operation."""
        return violations(self._state)

    def _knows(self, item: Item) -> bool:
        return item in self._state.unit_of or item in self._waiting

    def _forget(self, item: Item) -> None:
        if item in self._waiting:
            del self._waiting[item]
            return
        state = self._state
        unit = state.unit_of.pop(item)
        if not unit.grouped:
            state.remove(unit)
            return
        drop_member(state, unit, item)
        normalise(state, unit)

    def _resize(self, item: Item, size: int) -> None:
        state = self._state
        unit = state.unit_of[item]
        more = size - unit.members[item]
        if not more:
            return
        if unit.grouped and not is_minute(size, state.capacity):
            alone = move_out(state, unit, item, grouped=False)
            alone.members[item] = size
            state.resize(alone, size)
            normalise(state, unit)
            return
        unit.members[item] = size
        if not unit.grouped and is_minute(size, state.capacity):
            unit.grouped = True
        state.resize(unit, unit.size + more)
        if unit.grouped:
            normalise(state, unit)

    def _admit(self, item: Item, size: int, homeless: list[PackingUnit]) -> None:
        """Makes a new session a unit of its own, or a member of the open group."""
        state = self._state
        if not is_minute(size, state.capacity):
            homeless.append(state.new_unit({item: size}, grouped=False))
            return
        for group in state.open_groups.values():
            if group.bin is None or group.bin.used + size <= state.capacity:
                add_member(state, group, item, size)
                normalise(state, group)
                return
        group = state.new_unit({item: size}, grouped=True)
        state.open_groups[group.serial] = group
        homeless.append(group)

    def _place_waiting(self) -> bool:
        """Places waiting sessions in order until one finds no bin; True if any was placed."""
        queue = deque(self._waiting.items())
        state = self._state
        while queue:
            item, size = queue[0]
            homeless: list[PackingUnit] = []
            self._admit(item, size, homeless)
            if homeless and not place_unit(state, homeless[0]):
                del state.unit_of[item]
                state.open_groups.pop(homeless[0].serial, None)
                break
            queue.popleft()
        placed_any = len(queue) < len(self._waiting)
        self._waiting = dict(queue)
        return placed_any

    def _preempt(self, lost: list[PackingUnit]) -> list[Item]:
        """Puts running sessions that found no bin at the head of the queue, and returns them."""
        sizes = {item: size for unit in lost for item, size in unit.members.items()}
        for unit in lost:
            self._state.open_groups.pop(unit.serial, None)
        for item in sizes:
            del self._state.unit_of[item]
        self._waiting = {**sizes, **self._waiting}
        return list(sizes)

    def _result(self, fresh: set[Item], preempted: list[Item]) -> EpochResult:
        state = self._state
        fresh.update(preempted)
        moves: list[PackingMove] = []
        units: set[tuple[int, int]] = set()
        for item, source in state.origins.items():
            unit = state.unit_of.get(item)
            if unit is None or unit.bin is None or item in fresh or unit.bin.number == source:
                continue
            moves.append(PackingMove(item, source, unit.bin.number, unit.members[item]))
            units.add((unit.serial, source))
        self._item_moves = len(units)
        placed = {item: self._number(item) for item in fresh if item in state.unit_of}
        return EpochResult(tuple(moves), placed, tuple(self._waiting), tuple(preempted))

    def _number(self, item: Item) -> int:
        place = self._state.unit_of[item].bin
        assert place is not None, "every unit has a place between operations"
        return place.number
