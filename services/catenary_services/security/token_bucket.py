"""A token bucket without a clock: time is an argument."""

from __future__ import annotations

import math

from catenary_services.security.key_limits import RateLimit

_SECOND_NS = 1_000_000_000
_ROUNDING = 1e-6
"""Less than this is missing only because floats are not exact."""


class TokenBucket:
    """Holds at most `burst`; `per_s` flow in. Starts full.

    What is larger than the bucket is let in when the bucket is full, and leaves a debt: so nothing
    waits for ever, and what is taken in any stretch of `t` seconds is at most `per_s * t + burst`,
    plus one such piece.
    """

    __slots__ = ("_burst", "_level", "_per_s", "_updated_ns")

    def __init__(self, rate: RateLimit, now_ns: int) -> None:
        self._per_s = rate.per_s
        self._burst = rate.burst
        self._level = rate.burst
        self._updated_ns = now_ns

    def level(self, now_ns: int) -> float:
        """Returns what is in it; negative: a debt."""
        if now_ns > self._updated_ns:
            inflow = (now_ns - self._updated_ns) * self._per_s / _SECOND_NS
            self._level = min(self._burst, self._level + inflow)
            self._updated_ns = now_ns
        return self._level

    def take(self, amount: float, now_ns: int) -> int:
        """Takes `amount` if it is there.

        Returns:
            0 if it was taken, else after how many nanoseconds it would be; nothing is taken then.
        """
        wait_ns = self.wait_ns(amount, now_ns)
        if not wait_ns:
            self._level -= amount
        return wait_ns

    def wait_ns(self, amount: float, now_ns: int) -> int:
        """Returns after how many nanoseconds `amount` can be taken; 0: now."""
        missing = min(amount, self._burst) - self.level(now_ns)
        if missing <= _ROUNDING:
            return 0
        return math.ceil(missing / self._per_s * _SECOND_NS)

    def charge(self, amount: float, now_ns: int) -> None:
        """Takes `amount` whether it is there or not; what is missing is a debt."""
        self._level = self.level(now_ns) - amount

    def give_back(self, amount: float, now_ns: int) -> None:
        """Puts back what was taken and not used."""
        self._level = min(self._burst, self.level(now_ns) + amount)

    def reshape(self, rate: RateLimit, now_ns: int) -> None:
        """Goes on at another rate, as full or as much in debt as it was."""
        if (rate.per_s, rate.burst) == (self._per_s, self._burst):
            return
        filled = self.level(now_ns) / self._burst
        self._per_s, self._burst = rate.per_s, rate.burst
        self._level = min(1.0, filled) * rate.burst
