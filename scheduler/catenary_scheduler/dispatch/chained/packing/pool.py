"""The chains of one kind under one packer, and the sessions that should be on each.

The packer has bins, numbered from 0. Chains are matched to them, and matched anew when that lets
more sessions stay. Sessions come to chains without the packer (placement), and stay where they are
although they should move (no room, no time, an objective). So before every epoch the packer is told
what is where, and what it wants counts from there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from catenary_scheduler.dispatch.chained.packing.view import PackedChain, SessionSnapshot, size_of
from catenary_scheduler.packing.config import PackingConfig
from catenary_scheduler.packing.lazy.lazy_pool import LazyPool
from catenary_scheduler.packing.load_balancing import balancing_moves
from catenary_scheduler.packing.moves import Item
from catenary_scheduler.packing.transfers.relabelling import relabel
from catenary_services.domain.ids import AgentId, RequestId
from catenary_services.domain.packing import PackingGoal
from catenary_services.errors import CatenaryError

ProposedMove = tuple[SessionSnapshot, PackedChain]
"""A session, and the chain it should move to."""


_FILLED = 0.875
"""The share of a chain that counts as usable when the number of needed chains is computed."""


_EVEN_SESSIONS = 2
"""Loads that differ by this many mean sessions are even (goal "balance"),"""
_EVEN_SHARE = 0.25
"""and so are loads that differ by this share of the mean load."""


class ChainPool:
    """Chains of nearly one capacity.

    Attributes:
        chains: In order of preference: among equals, the first are filled.
        capacity: Blocks of the smallest chain.
        seen: The sessions on them, by request; filled anew for every epoch.
        faults: Number of times that the packer could not go on and was made anew.
    """

    def __init__(
        self, goal: PackingGoal, chains: Sequence[PackedChain], balance_threshold: float
    ) -> None:
        self.chains = list(chains)
        self.capacity = min(chain.capacity for chain in chains)
        self.seen: dict[Item, SessionSnapshot] = {}
        self.faults = 0
        self._goal = goal
        self._threshold = int(balance_threshold * self.capacity)
        self._agents = [frozenset([hop.agent for hop in chain.route.hops]) for chain in chains]
        for place, chain in enumerate(self.chains):
            chain.place = place
        self._bin_of: list[int] = []
        self._chain_of: list[int] = []
        self._known: dict[Item, None] = {}
        self._pool = self._new_pool()

    def wanted(self) -> list[ProposedMove]:
        """Returns the moves that the sessions seen in this epoch should make."""
        if self._goal == "balance":
            return self._balanced()
        try:
            return self._packed()
        except (CatenaryError, AssertionError):
            # Packing is a convenience: whatever fails in it, sessions go on where they are.
            self.faults += 1
            self._pool = self._new_pool()
            return []

    def preferred(self, tokens: int) -> PackedChain | None:
        """Returns the chain for a new session of so many tokens; None if any will do."""
        if self._goal != "pack" or not self._known:
            return None
        at = self._pool.bin_for(size_of(self.chains[0], tokens, 0.0))
        if at is not None:
            return self.chains[self._chain_of[at]]
        for place in self._by_use():
            if not self.chains[place].route.running:
                return self.chains[place]
        return None

    def started(self, request: RequestId, chain: PackedChain, tokens: int) -> None:
        """Notes that a session has begun on a chain between two epochs."""
        if self._goal == "pack":
            size = min(size_of(chain, tokens, 0.0), self.capacity)
            self._pool.place(request, size, self._bin_of[chain.place])
            self._known[request] = None

    @property
    def in_use(self) -> int:
        """Number of chains that hold sessions."""
        return sum(1 for chain in self.chains if chain.sessions)

    @property
    def needed(self) -> int:
        """Number of chains the sessions would need if packed anew, with room left to grow.

        It does not matter whether they get there: the sessions of an agent that is removed are
        moved whether or not the packer's rules find it worth while.
        """
        capacity = max(1, int(_FILLED * self.capacity))
        return bins_needed([min(each.size, capacity) for each in self.seen.values()], capacity)

    def _new_pool(self) -> LazyPool:
        count = len(self.chains)
        self._bin_of, self._chain_of = list(range(count)), list(range(count))
        self._known = {}
        return LazyPool(
            self.capacity, most_bins=count, config=PackingConfig(distance=self._distance)
        )

    def _distance(self, source: int, target: int) -> float:
        """Returns the share of the target's agents that the source lacks: what has to travel."""
        if not (0 <= source < len(self.chains) and 0 <= target < len(self.chains)):
            return 1.0
        there = self._agents[self._chain_of[target]]
        return 1.0 - len(self._agents[self._chain_of[source]] & there) / len(there)

    # Goal "pack"

    def _packed(self) -> list[ProposedMove]:
        pool, seen = self._pool, self.seen
        gone = [item for item in self._known if item not in seen]
        sizes: dict[Item, int] = {}
        for item, each in seen.items():
            size = sizes[item] = min(each.size, self.capacity)
            here = self._bin_of[each.chain.place]
            if item not in self._known or pool.bin_of(item) != here:
                pool.place(item, size, here)
        self._known = dict.fromkeys(seen)
        moves = pool.epoch(gone, sizes, {}).moves
        if not moves:
            return []
        self._match(pool.bins(), sizes)
        found: list[ProposedMove] = []
        for item, each in seen.items():
            at = pool.bin_of(item)
            if at is not None and self._chain_of[at] != each.chain.place:
                found.append((each, self.chains[self._chain_of[at]]))
        return found

    def _match(self, bins: Mapping[int, Sequence[Item]], sizes: Mapping[Item, int]) -> None:
        """Matches each bin to the chain that already has most of what the bin is to hold.

        Matches that already are such stay: only the other bins, and chains that are not needed, are
        matched anew.
        """
        where = {item: each.chain.place for item, each in self.seen.items()}
        others = [n for n in bins if not self._is_at_home(bins[n], self._chain_of[n], where, sizes)]
        if not others:
            return
        spare = [number for number in range(len(self.chains)) if number not in bins]
        numbers = others + spare
        free = {self._chain_of[number] for number in numbers}
        places = [place for place in self._by_use() if place in free]
        labels = relabel([bins[number] for number in others], where, sizes, places)
        left = [place for place in places if place not in labels]
        for number, place in zip(numbers, [*labels, *left], strict=True):
            assert place is not None, "there are as many chains as bins"
            self._chain_of[number] = place
            self._bin_of[place] = number

    @staticmethod
    def _is_at_home(
        items: Sequence[Item], home: int, where: Mapping[Item, int], sizes: Mapping[Item, int]
    ) -> bool:
        """True if no other chain has more of what a bin is to hold."""
        there: dict[int, int] = {}
        for item in items:
            place = where.get(item)
            if place is not None:
                there[place] = there.get(place, 0) + sizes[item]
        return there.get(home, 0) > 0 and there[home] >= max(there.values())

    def _by_use(self) -> list[int]:
        """Returns the chains in the order in which empty ones are taken.

        Chains whose agents are in use anyway come first: only an agent that is on no chain in use
        is free for something else.
        """
        busy: set[AgentId] = set()
        for chain in self.chains:
            if chain.sessions:
                busy |= self._agents[chain.place]
        places = list(range(len(self.chains)))
        return sorted(places, key=lambda at: (len(self._agents[at] - busy), at))

    # Goal "balance"

    def _even_enough(self) -> int:
        """Returns by how much loads may differ and still count as even.

        It is a tenth of a chain, as in Llumnix. But where chains are far from full, that is many
        sessions, whose steps suffer: then it is two sessions, or a quarter of the mean load if that
        is more, since differences of that size come and go by themselves.
        """
        sizes = [each.size for each in self.seen.values()]
        session = sum(sizes) / max(1, len(sizes))
        mean = sum(sizes) / len(self.chains)
        return min(self._threshold, round(max(_EVEN_SESSIONS * session, _EVEN_SHARE * mean)))

    def _balanced(self) -> list[ProposedMove]:
        movable: dict[int, dict[Item, int]] = {}
        for item, each in self.seen.items():
            if not each.rests or each.chain.overflows:
                movable.setdefault(each.chain.place, {})[item] = each.size
        loads = {chain.place: chain.held for chain in self.chains}
        moves = balancing_moves(loads, movable, self._even_enough(), len(self.chains))
        return [(self.seen[move.item], self.chains[move.target]) for move in moves]


def bins_needed(sizes: Sequence[int], capacity: int) -> int:
    """Returns how many bins best fit decreasing needs: at most 11/9 of the fewest, plus 1.

    Args:
        sizes: Sizes of the items, none larger than the capacity.
        capacity: Capacity of a bin.
    """
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        at = bisect_left(rooms, size)
        room = rooms.pop(at) if at < len(rooms) else capacity
        insort(rooms, room - size)
    return len(rooms)
