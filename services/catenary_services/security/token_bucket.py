"""A token bucket without a clock of its own: the time is an argument."""

from __future__ import annotations

import math

from catenary_services.security.key_limits import RateLimit

_SECOND_NS = 1_000_000_000
_ROUNDING = 1e-6
"""A smaller amount is missing only because floats are not exact."""


class TokenBucket:
    """A bucket that holds at most `burst` and fills at `per_s` a second; it starts full.

    An amount larger than the bucket is granted when the bucket is full, and leaves a debt. So
    nothing waits for ever, and what is taken in any stretch of `t` seconds is at most `per_s * t +
    burst`, plus one such amount.
    """

    __slots__ = ("_burst", "_level", "_per_s", "_updated_ns")

    def __init__(self, rate: RateLimit, now_ns: int) -> None:
        self._per_s = rate.per_s
        self._burst = rate.burst
        self._level = rate.burst
        self._updated_ns = now_ns

    def level(self, now_ns: int) -> float:
        """Returns the level of the bucket; negative if it is in debt."""
        if now_ns > self._updated_ns:
            inflow = (now_ns - self._updated_ns) * self._per_s / _SECOND_NS
            self._level = min(self._burst, self._level + inflow)
            self._updated_ns = now_ns
        return self._level

    def take(self, amount: float, now_ns: int) -> int:
        """Takes `amount` if the bucket holds it.

        Returns:
            0 if it was taken; otherwise the nanoseconds after which it can be taken.
        """
        wait_ns = self.wait_ns(amount, now_ns)
        if not wait_ns:
            self._level -= amount
        return wait_ns

    def wait_ns(self, amount: float, now_ns: int) -> int:
        """Returns the nanoseconds after which `amount` can be taken; 0 for now."""
        missing = min(amount, self._burst) - self.level(now_ns)
        if missing <= _ROUNDING:
            return 0
        return math.ceil(missing / self._per_s * _SECOND_NS)

    def charge(self, amount: float, now_ns: int) -> None:
        """Takes `amount` even if the bucket does not hold it; the rest becomes a debt."""
        self._level = self.level(now_ns) - amount

    def give_back(self, amount: float, now_ns: int) -> None:
        """Puts back an amount that was taken and not used."""
        self._level = min(self._burst, self.level(now_ns) + amount)

    def reshape(self, rate: RateLimit, now_ns: int) -> None:
        """Changes rate and size of the bucket, and scales its level or debt with the size."""
        if (rate.per_s, rate.burst) == (self._per_s, self._burst):
            return
        filled = self.level(now_ns) / self._burst
        self._per_s, self._burst = rate.per_s, rate.burst
        self._level = min(1.0, filled) * rate.burst
