"""How fast caches travel from agent to agent, by what agents say they sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

_WINDOW = 16
"""Late samples that count: a link that has changed is believed after half of them."""
_FEWEST_BYTES = 64 * 1024
"""What is smaller says how long a frame takes, not how fast a link is: the rows that a session adds
while it moves are sent token by token."""
_WEIGHTIEST_BYTES = 16 * 1024 * 1024
"""Nothing weighs more than so many bytes, so that one long session is not all that counts."""


class LinkRate:
    """Bytes per second of one link, in one direction: the median of late samples, by their bytes.

    A median, because samples lie in one direction only and far away: whatever else was on the link,
    or kept the sender from sending, makes a sample slow. What half of the bytes travelled faster
    than is a rate that can be had again.
    """

    __slots__ = ("_samples", "bytes_per_second")

    def __init__(self, bytes_per_second: int = 0) -> None:
        self.bytes_per_second = bytes_per_second
        """0: nothing is known."""
        self._samples: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        """Rate and weight."""
        if bytes_per_second > 0:  # what was known before counts as one sample
            self._samples.append((bytes_per_second, _FEWEST_BYTES))

    def add(self, size: int, sending_ns: Nanoseconds) -> bool:
        """Takes in that so many bytes were on their way so long; True if the rate is another now.

        Samples that are too small to tell anything are left out.
        """
        if size < _FEWEST_BYTES or sending_ns <= 0:
            return False
        rate = max(1, size * NANOSECONDS_PER_SECOND // sending_ns)
        self._samples.append((rate, min(size, _WEIGHTIEST_BYTES)))
        before, self.bytes_per_second = self.bytes_per_second, _median(self._samples)
        return self.bytes_per_second != before


def _median(samples: Iterable[tuple[int, int]]) -> int:
    """Returns the lowest value that at least half of the weight is not above."""
    ordered = sorted(samples)
    half = sum(weight for _, weight in ordered) / 2
    below = 0
    for value, weight in ordered:
        below += weight
        if below >= half:
            return value
    raise AssertionError("a median of nothing")
