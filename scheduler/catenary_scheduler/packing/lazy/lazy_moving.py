"""Moves of lazy packing: sessions leave bins that overflow, and nearly empty bins are emptied."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.packing.active_bins import ActiveBins
from catenary_scheduler.packing.lazy.bin_forecast import BinForecast, LazyRules
from catenary_scheduler.packing.moves import Item, PackingMove

Distance = Callable[[int, int], float]


_LOOKED_AT = 12
"""Number of bins with the most room that are examined for a session. No other bin has more room, so
no place is missed; few of the others would last longer."""


class LazyMover:
    """Chooser of the bins to which sessions go. It changes nothing itself.

    The bin with the least load is left alone where others will do, so that it drains.

    Args:
        active_bins: The bins and their sessions.
        forecast: Forecast of how long bins last.
        rules: Thresholds that decide when a move is worth its cost.
        distance: Distance between two bins, in epochs that are subtracted from the time the target
            lasts; None if all are equally near.

    Time: of every method, O(sessions of a bin), whatever the number of bins.
    """

    def __init__(
        self,
        active_bins: ActiveBins,
        forecast: BinForecast,
        rules: LazyRules,
        distance: Distance | None,
    ) -> None:
        self._active_bins = active_bins
        self._forecast = forecast
        self._rules = rules
        self._distance = distance

    def arrival(self, size: int) -> int | None:
        """Returns the bin for a new session: the one that lasts longest with it.

        A bin without headroom is preferred to a new one. The result is None if no bin has room.
        """
        forecast, rules = self._forecast, self._rules
        places = self._roomy(size)
        lasting, longest = -1, 0.0
        any_way, most = -1, 0.0
        for number, (gpu, room, count) in enumerate(places):
            lasts = forecast.epochs_left(room - size, count + 1)
            if any_way < 0 or lasts > most:
                any_way, most = gpu, lasts
            drains = number == 0 and len(self._active_bins) > 1
            enough = room - size >= forecast.headroom(count + 1, rules.arrival_epochs)
            if enough and not drains and (lasting < 0 or lasts > longest):
                lasting, longest = gpu, lasts
        if lasting >= 0:
            return lasting
        if not places:
            return None
        return places[0][0] if len(self._active_bins) > 1 else any_way

    def relief(self, gpu: int) -> PackingMove | None:
        """Returns the move that makes an overflowing bin fit, or brings it closer.

        Of all such moves it is the one after which the first of the two bins to overflow lasts
        longest. The bin that drains is taken only if no other lasts long enough. The result is None
        if no session can go.
        """
        active_bins, rules = self._active_bins, self._rules
        excess = active_bins.load_of(gpu) - active_bins.capacity
        places = [entry for entry in self._roomy(0) if entry[0] != gpu]
        left = active_bins.count_of(gpu) - 1
        best: PackingMove | None = None
        most = (False, False, 0.0)
        for size, item in self._largest_first(gpu):
            after = self._forecast.epochs_left(size - excess, left)
            if best is not None:
                bound = (after >= rules.target_epochs, True, after)
                if size < excess or bound <= most:
                    break
            for number, (target, room, count) in enumerate(places):
                if room < size:
                    break
                lasts = min(after, self._forecast.epochs_left(room - size, count + 1))
                lasts -= self._far(gpu, target)
                enough = lasts >= rules.target_epochs
                rank = (enough, enough and number > 0, lasts)
                if best is None or rank > most:
                    best, most = PackingMove(item, gpu, target, size), rank
        return best

    def leaving(self, gpu: int) -> Item:
        """Returns the session that leaves a bin if no other has room: the smallest that is enough.

        If none is enough, it is the largest.
        """
        excess = self._active_bins.load_of(gpu) - self._active_bins.capacity
        sizes = self._largest_first(gpu)
        enough = [item for size, item in sizes if size >= excess]
        return enough[-1] if enough else sizes[0][1]

    def emptying(self, most: int) -> list[PackingMove]:
        """Returns moves that empty a bin, so that it can be deactivated; none if not worth it.

        Args:
            most: Largest number of sessions that may move.
        """
        active_bins = self._active_bins
        if len(active_bins) < 2:
            return []
        low = [
            (active_bins.count_of(gpu), gpu)
            for gpu in active_bins.emptiest(2 * self._rules.candidates)
        ]
        for count, gpu in sorted(low)[: self._rules.candidates]:
            if count <= min(most, self._rules.most_emptied):
                moves = self._spread(gpu)
                if moves:
                    return moves
        return []

    def _spread(self, gpu: int) -> list[PackingMove]:
        """Returns moves of all sessions of a bin, large ones first; none if one cannot go."""
        forecast, rules = self._forecast, self._rules
        places = [entry for entry in self._roomy(0) if entry[0] != gpu]
        moves: list[PackingMove] = []
        for size, item in self._largest_first(gpu):
            best, most = -1, 0.0
            for number, (target, room, count) in enumerate(places):
                if room - size >= forecast.headroom(count + 1, rules.emptying_epochs):
                    lasts = forecast.epochs_left(room - size, count + 1) - self._far(gpu, target)
                    if best < 0 or lasts > most:
                        best, most = number, lasts
            if best < 0:
                return []
            target, room, count = places[best]
            places[best] = (target, room - size, count + 1)
            moves.append(PackingMove(item, gpu, target, size))
        return moves

    def _roomy(self, size: int) -> list[tuple[int, int, int]]:
        """Returns (bin, room, sessions) of the bins with the most room, in descending order.

        Bins with less than `size` are left out.
        """
        active_bins = self._active_bins
        found = []
        for gpu in active_bins.emptiest(_LOOKED_AT):
            room = active_bins.capacity - active_bins.load_of(gpu)
            if room < size:
                break
            found.append((gpu, room, active_bins.count_of(gpu)))
        return found

    def _largest_first(self, gpu: int) -> list[tuple[int, Item]]:
        active_bins = self._active_bins
        sizes = [(active_bins.size_of(item), item) for item in active_bins.items_of(gpu)]
        return sorted(sizes, key=_size_of, reverse=True)

    def _far(self, source: int, target: int) -> float:
        return 0.0 if self._distance is None else self._distance(source, target)


def _size_of(entry: tuple[int, Item]) -> int:
    return entry[0]
