"""Best fit and worst fit: sessions stay where they were put until they end (Mell, section VIII-B).

The paper does not say what happens to sessions that outgrow their GPU. Here the youngest of them
loses its cache and is dispatched again, its tokens read anew, as in engines without migration. The
rivals that reserve the final length at admission are these same policies, told final lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from catenary_scheduler.packing.active_bins import ActiveBins
from catenary_scheduler.packing.moves import EpochResult, Item, PackingMove
from catenary_scheduler.packing.validating import check_epoch, check_size


class Baseline(ABC):
    """Frame of the plain policies: depart, grow, relieve, place in order, close.

    A session that cannot be placed waits, and no session overtakes it (first come, first served). A
    preempted session waits before all others.

    Args:
        capacity: Capacity of a GPU, in blocks.
        most_bins: Largest number of active GPUs; None: any number.
    """

    def __init__(self, capacity: int, *, most_bins: int | None = None) -> None:
        self._active_bins = ActiveBins(capacity, most_bins)
        self._ages: dict[Item, int] = {}
        """Order of arrival of every session that is placed or queued."""
        self._arrived = 0
        self._waiting: dict[Item, int] = {}
        """Sizes of queued sessions, in the order of the queue."""

    def epoch(
        self, departed: Iterable[Item], sizes: Mapping[Item, int], arrived: Mapping[Item, int]
    ) -> EpochResult:
        """Takes the events since the last epoch and returns the changes; see `Policy`.

        Raises:
            InvalidInput: A session is larger than a GPU, is unknown, or is known already; nothing
                has changed then.
        """
        active_bins = self._active_bins
        gone = list(departed)
        check_epoch(gone, sizes, arrived, self._ages.__contains__, active_bins.capacity)
        for item in gone:
            self._forget(item)
        active_bins.resize(sizes)
        for item in self._waiting.keys() & sizes.keys():
            self._waiting[item] = sizes[item]
        origins: dict[Item, int] = {}
        preempted = self._relieve(origins)
        active_bins.close_empty()  # even if a session arrives in this epoch, an idle GPU closes
        self._waiting = {**preempted, **self._waiting}
        for item, size in arrived.items():
            assert 0 < size <= active_bins.capacity, "a session must fit an empty gpu"
            self._ages[item] = self._arrived = self._arrived + 1
            self._waiting[item] = size
        placed = self._place_waiting()
        self._rebalance(origins)
        active_bins.close_empty()
        return EpochResult(
            self._net_moves(origins, placed),
            {item: self._on(item) for item in placed},
            tuple(self._waiting),
            tuple(preempted),
        )

    def place(self, item: Item, size: int, gpu: int) -> None:
        """Adopts a session, new or known, that somebody else has put on a GPU.

        Raises:
            InvalidInput: The session is larger than a GPU.
        """
        check_size("size", size, self._active_bins.capacity)
        if item in self._ages:
            age = self._ages[item]
            self._forget(item)
        else:
            age = self._arrived = self._arrived + 1
        self._ages[item] = age
        self._active_bins.ensure(gpu)
        self._active_bins.put(item, size, gpu)

    def bin_of(self, item: Item) -> int | None:
        """Returns the GPU of a session; None if the session is queued or unknown."""
        return self._active_bins.bin_of(item)

    def size_of(self, item: Item) -> int:
        """Returns the number of blocks that a placed session holds."""
        return self._active_bins.size_of(item)

    def bins(self) -> Mapping[int, Sequence[Item]]:
        """Returns the active GPUs, each with its sessions."""
        return self._active_bins.bins()

    @abstractmethod
    def _choose(self, size: int) -> int | None:
        """Returns the active GPU for a session of this size; None if none has room."""

    def _relieve(self, origins: dict[Item, int]) -> dict[Item, int]:
        """Makes overflowing GPUs fit again; returns the sessions that lost caches, oldest first.

        Args:
            origins: The GPUs that moved sessions come from, to be added to.
        """
        victims: dict[Item, int] = {}
        for gpu in self._active_bins.overflowing():
            while self._active_bins.load_of(gpu) > self._active_bins.capacity:
                youngest = max(self._active_bins.items_of(gpu), key=self._ages.__getitem__)
                victims[youngest] = self._active_bins.take(youngest)[1]
        return {item: victims[item] for item in sorted(victims, key=self._ages.__getitem__)}

    def _rebalance(self, origins: dict[Item, int]) -> None:  # noqa: B027 - a hook, not a duty
        """Moves running sessions; plain policies move none."""

    def _bin_for(self, size: int) -> int | None:
        """Returns the GPU of choice, a new one if none has room; None if no more are allowed."""
        gpu = self._choose(size)
        return self._active_bins.activate() if gpu is None else gpu

    def _place_waiting(self) -> list[Item]:
        placed: list[Item] = []
        queue = deque(self._waiting.items())
        while queue:
            item, size = queue[0]
            gpu = self._bin_for(size)
            if gpu is None:
                break
            queue.popleft()
            self._active_bins.put(item, size, gpu)
            placed.append(item)
        self._waiting = dict(queue)
        return placed

    def _net_moves(
        self, origins: Mapping[Item, int], placed: Iterable[Item]
    ) -> tuple[PackingMove, ...]:
        """Returns a move for every session that is on another GPU than before."""
        fresh = set(placed)
        moves = []
        for item, source in origins.items():
            target = self._active_bins.bin_of(item)
            if target is not None and target != source and item not in fresh:
                moves.append(PackingMove(item, source, target, self._active_bins.size_of(item)))
        return tuple(moves)

    def _forget(self, item: Item) -> None:
        del self._ages[item]
        if item in self._active_bins:
            self._active_bins.take(item)
        else:
            del self._waiting[item]

    def _on(self, item: Item) -> int:
        gpu = self._active_bins.bin_of(item)
        assert gpu is not None
        return gpu


class BestFit(Baseline):
    """Every session goes to the fullest GPU that has room for it."""

    def _choose(self, size: int) -> int | None:
        return self._active_bins.best_fit(size)


class WorstFit(Baseline):
    """Every session goes to the emptiest GPU."""

    def _choose(self, size: int) -> int | None:
        bins = self._active_bins
        emptiest = bins.emptiest(1)
        if not emptiest or bins.load_of(emptiest[0]) + size > bins.capacity:
            return None
        return emptiest[0]
