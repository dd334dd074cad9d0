"""A limit on what a peer costs while nothing gets done: a bucket that time and work fill."""

from __future__ import annotations

from catenary_services.http2.frames import ENHANCE_YOUR_CALM, ConnectionViolation
from catenary_services.http2.limits import FLOOD_BURST, FLOOD_PER_S


class FloodLimit:
    """The bucket of one connection; it starts full.

    Attributes:
        now_s: The time; whoever feeds the connection keeps it.
    """

    __slots__ = ("_left", "_since_s", "now_s")

    def __init__(self, now_s: float) -> None:
        self._left = FLOOD_BURST
        self._since_s = self.now_s = now_s

    def spend(self, cost: int) -> None:
        """Takes `cost` out of the bucket.

        Raises:
            ConnectionViolation: There is not so much in it.
        """
        self._left -= cost
        if self._left < 0:
            self.restore(int((self.now_s - self._since_s) * FLOOD_PER_S))
            self._since_s = self.now_s
            if self._left < 0:
                raise ConnectionViolation(ENHANCE_YOUR_CALM, "too many frames move nothing")

    def restore(self, amount: int) -> None:
        """Puts something back."""
        self._left = min(FLOOD_BURST, self._left + amount)
