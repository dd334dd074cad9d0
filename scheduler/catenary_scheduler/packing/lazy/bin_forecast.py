"""How fast sessions grow, and how long a bin lasts at that pace before it overflows."""

from __future__ import annotations

from dataclasses import dataclass

_LEARNING = 0.1
"""Weight of the latest epoch in what is known of the pace."""
_FOR_EVER = 1e12


@dataclass(frozen=True, slots=True)
class LazyRules:
    """When a move is worth its while. Times are in epochs."""

    arrival_epochs: float = 5.0
    """A new session goes where it and the others can grow for so long, if there is such a bin."""
    target_epochs: float = 5.0
    """The same for a session that has to leave a bin; where it can be had, the bin that drains is
    left alone."""
    emptying_epochs: float = 6.0
    """A bin is emptied only if all others can grow for so long afterwards: else the sessions would
    soon have to move again."""
    headroom_share: float = 0.125
    """More room than this share of a bin is never asked for: in the long run as much ends as
    grows."""
    most_emptied: int = 6
    """A bin is emptied only when no more sessions than this are left on it."""
    candidates: int = 3
    """Bins that are looked at for it: of twice as many with the least load, those with the fewest
    sessions."""


class BinForecast:
    """What is to be expected of bins of one capacity.

    Args:
        capacity: Of a bin.
        rules: Shares of it.
    """

    def __init__(self, capacity: int, rules: LazyRules) -> None:
        self._pace = -1.0
        self._most = rules.headroom_share * capacity

    def learn(self, grown: int, sessions: int) -> None:
        """Takes by how much running sessions grew together in one epoch."""
        if sessions:
            pace = max(0.0, grown / sessions)
            self._pace = pace if self._pace < 0 else self._pace + _LEARNING * (pace - self._pace)

    def headroom(self, sessions: int, epochs: float) -> float:
        """Returns the room that so many sessions are to have to grow for so long."""
        return min(self._most, epochs * max(0.0, self._pace) * sessions)

    def epochs_left(self, room: int, sessions: int) -> float:
        """Returns how long sessions with so much room can grow."""
        pace = max(0.0, self._pace) * sessions
        return room / pace if pace > 0 else _FOR_EVER + room
