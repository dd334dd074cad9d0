"""What a peer may cost while nothing gets done: a bucket that fills with time and with work."""

from __future__ import annotations

from catenary_services.http2.frames import ENHANCE_YOUR_CALM, ConnectionViolation
from catenary_services.http2.limits import PATIENCE, PATIENCE_PER_S


class Patience:
    """The bucket of one connection; it starts full."""

    __slots__ = ("_left", "_since_s")

    def __init__(self, now_s: float) -> None:
        self._left = float(PATIENCE)
        self._since_s = now_s

    def spend(self, cost: int, now_s: float) -> None:
        """Takes `cost` out of the bucket.

        Raises:
            ConnectionViolation: There is not so much in it.
        """
        self._left -= cost
        if self._left < 0:
            self._left = min(PATIENCE, self._left + (now_s - self._since_s) * PATIENCE_PER_S)
            self._since_s = now_s
            if self._left < 0:
                raise ConnectionViolation(ENHANCE_YOUR_CALM, "too many frames move nothing")

    def restore(self, amount: int) -> None:
        """Puts something back."""
        self._left = min(PATIENCE, self._left + amount)
