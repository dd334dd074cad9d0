"""Forecast of how fast sessions grow, and of how long a bin lasts before it overflows."""

from __future__ import annotations

from dataclasses import dataclass

_LEARNING = 0.1
"""Weight of the latest epoch in the estimate of the pace."""
_FOR_EVER = 1e12


@dataclass(frozen=True, slots=True)
class LazyRules:
    """Thresholds that decide when a move is worth its cost. Times are in epochs."""

    arrival_epochs: float = 5.0
    """Time for which a new session and those beside it should be able to grow where it is
    placed."""
    target_epochs: float = 5.0
    """Time for which a session that has to leave a bin should be able to grow where it goes. If
    other bins offer it, the bin that drains is left alone."""
    emptying_epochs: float = 6.0
    """Time for which all other bins must be able to grow after a bin was emptied. Otherwise the
    sessions would soon have to move again."""
    headroom_share: float = 0.125
    """Largest headroom that is ever asked for, as a share of a bin. In the long run as much memory
    is freed by sessions that end as others grow."""
    most_emptied: int = 6
    """Largest number of sessions on a bin that is emptied."""
    candidates: int = 3
    """Number of bins that are examined for emptying: of twice as many with the least load, those
    with the fewest sessions."""


class BinForecast:
    """Forecast of growth for bins of one capacity.

    Args:
        capacity: Capacity of a bin, in the unit of the sizes.
        rules: Limit of the headroom, as a share of the capacity.
    """

    def __init__(self, capacity: int, rules: LazyRules) -> None:
        self._pace = -1.0
        self._most = rules.headroom_share * capacity

    def learn(self, grown: int, sessions: int) -> None:
        """Updates the pace with the total growth of the running sessions in one epoch."""
        if sessions:
            pace = max(0.0, grown / sessions)
            self._pace = pace if self._pace < 0 else self._pace + _LEARNING * (pace - self._pace)

    def headroom(self, sessions: int, epochs: float) -> float:
        """Returns the room that `sessions` sessions need in order to grow for `epochs` epochs.

        It is bounded by the policy's headroom.
        """
        return min(self._most, epochs * max(0.0, self._pace) * sessions)

    def epochs_left(self, room: int, sessions: int) -> float:
        """Returns for how many epochs `sessions` sessions can grow within `room`."""
        pace = max(0.0, self._pace) * sessions
        return room / pace if pace > 0 else _FOR_EVER + room
