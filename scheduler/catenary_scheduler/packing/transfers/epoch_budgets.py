"""Budgets of moves for resources that are refilled continuously."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from catenary_services.domain.ids import Nanoseconds

Key = TypeVar("Key", bound=Hashable)


class EpochBudgets(Generic[Key]):
    """A budget per key and epoch. What was taken is made up for at the rate of the budget.

    A single move may be larger than the budget of an epoch. It passes when nothing is owed, and
    then nothing else passes until it is made up for. In the long run no more passes than the budget
    allows, and no move waits for ever only because it is large.

    Args:
        epoch_ns: Length of an epoch in nanoseconds.
    """

    def __init__(self, epoch_ns: Nanoseconds) -> None:
        self._epoch_ns = epoch_ns
        self._owed: dict[Key, tuple[float, Nanoseconds]] = {}
        """Amount that was taken and not yet made up for, and the moment of that amount, by key."""

    def __len__(self) -> int:
        """Returns the number of keys for which something is owed."""
        return len(self._owed)

    def room(self, key: Key, per_epoch: int, now: Nanoseconds, largest: int = 0) -> int:
        """Returns how much of a key may be taken now.

        Args:
            key: The resource.
            per_epoch: Its budget in each epoch.
            now: The present moment.
            largest: Size of the largest move that waits; it may pass if nothing is owed.
        """
        owed = self._owed_now(key, per_epoch, now)
        if not owed and per_epoch > 0:
            return max(per_epoch, largest)
        return max(0, int(per_epoch - owed))

    def take(self, key: Key, size: int, per_epoch: int, now: Nanoseconds) -> None:
        """Counts that `size` of a key is taken."""
        owed = self._owed_now(key, per_epoch, now) + size
        if owed:
            self._owed[key] = owed, now

    def _owed_now(self, key: Key, per_epoch: int, now: Nanoseconds) -> float:
        known = self._owed.get(key)
        if known is None:
            return 0.0
        owed, since = known
        left = owed - per_epoch * (now - since) / self._epoch_ns
        if left > 0:
            return left
        del self._owed[key]
        return 0.0
