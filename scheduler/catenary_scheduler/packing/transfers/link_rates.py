"""Measured rates at which caches travel from agent to agent, from reports of what was sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

_WINDOW = 16
"""Number of recent samples that count. A link that has changed is believed after half of them."""
_FEWEST_BYTES = 64 * 1024
"""Size below which a sample is ignored. It would say how long a frame takes, not how fast a link
is: the rows that a session adds while it moves are sent token by token."""
_WEIGHTIEST_BYTES = 16 * 1024 * 1024
"""Largest weight of a sample in bytes, so that one long session does not outweigh all others."""


class LinkRate:
    """Bytes per second of one link in one direction: a median of samples, weighted by bytes.

    It is a median because samples deviate in one direction only, and far: other traffic, or a busy
    sender, makes a sample slow. A rate that half of the bytes exceeded can be reached again.
    """

    __slots__ = ("_samples", "bytes_per_second")

    def __init__(self, bytes_per_second: int = 0) -> None:
        self.bytes_per_second = bytes_per_second
        """Present estimate of the rate; 0 if nothing is known."""
        self._samples: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        """Pairs of a rate in bytes per second and its weight in bytes."""
        if bytes_per_second > 0:  # what was known before counts as one sample
            self._samples.append((bytes_per_second, _FEWEST_BYTES))

    def add(self, size: int, sending_ns: Nanoseconds) -> bool:
        """Adds a sample: `size` bytes were on their way for `sending_ns`.

        Returns True if the estimate changes.

        Samples that are too small are ignored.
        """
        if size < _FEWEST_BYTES or sending_ns <= 0:
            return False
        rate = max(1, size * NANOSECONDS_PER_SECOND // sending_ns)
        self._samples.append((rate, min(size, _WEIGHTIEST_BYTES)))
        before, self.bytes_per_second = self.bytes_per_second, _median(self._samples)
        return self.bytes_per_second != before


def _median(samples: Iterable[tuple[int, int]]) -> int:
    """Returns the lowest value such that values up to it have at least half of the weight."""
    ordered = sorted(samples)
    half = sum(weight for _, weight in ordered) / 2
    below = 0
    for value, weight in ordered:
        below += weight
        if below >= half:
            return value
    raise AssertionError("a median of nothing")
