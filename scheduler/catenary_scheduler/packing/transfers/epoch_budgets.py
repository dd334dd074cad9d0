"""What moves may take of something that is refilled all the time, and have taken."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from catenary_services.domain.ids import Nanoseconds

Key = TypeVar("Key", bound=Hashable)


class EpochBudgets(Generic[Key]):
    """So much per epoch of each key; what was taken is made up for at that rate.

    A single move may be larger than all that is given in an epoch. It passes when nothing is owed,
    and then nothing else does until it is made up for: in the long run no more passes than is
    given, and nothing waits for ever only because it is large.

    Args:
        epoch_ns: Length of an epoch.
    """

    def __init__(self, epoch_ns: Nanoseconds) -> None:
        self._epoch_ns = epoch_ns
        self._owed: dict[Key, tuple[float, Nanoseconds]] = {}
        """What was taken and is not made up for, and when that was so."""

    def __len__(self) -> int:
        """Returns of how many keys something is owed."""
        return len(self._owed)

    def room(self, key: Key, per_epoch: int, now: Nanoseconds, largest: int = 0) -> int:
        """Returns how much may be taken now.

        Args:
            key: Of what.
            per_epoch: Given of it in each epoch.
            now: The moment.
            largest: Of what waits; it may pass if nothing is owed.
        """
        owed = self._owed_now(key, per_epoch, now)
        if not owed and per_epoch > 0:
            return max(per_epoch, largest)
        return max(0, int(per_epoch - owed))

    def take(self, key: Key, size: int, per_epoch: int, now: Nanoseconds) -> None:
        """Counts that so much is taken."""
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
