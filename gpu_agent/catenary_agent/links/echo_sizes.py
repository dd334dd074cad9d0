"""Sizes of the frames by which the rate of a link is found, and the rate they show.

A frame whose echo came after time T had a rate of at least its bytes by T, since T also holds a
round trip and both processes' work. So no figure is ever too high, whatever the load of the two
machines, and the best of several is the nearest. Frames grow until one takes so long that the round
trip hardly counts: that is soon on a slow link, which is thus burdened least.
"""

from __future__ import annotations

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

FIRST_BYTES = 64 << 10
LARGEST_BYTES = 8 << 20
_ENOUGH_NS = 100_000_000
_ENOUGH_ROUND_TRIPS = 8
"""A frame is long enough if it takes so many nanoseconds and round trips: its rate is then too low
by an eighth at most."""
_GROWTH = 4
_BEYOND = 1.2
"""The next frame is to take so many times as long as is enough."""


class EchoSizes:
    """The sizes of the frames of one measurement, one after the other.

    Args:
        most_bytes: The most bytes of all frames together.
        round_trip_ns: Time of a frame without a payload, and of its echo.
    """

    def __init__(self, most_bytes: int, round_trip_ns: Nanoseconds) -> None:
        self._left_bytes = most_bytes
        self._enough_ns = max(_ENOUGH_NS, _ENOUGH_ROUND_TRIPS * round_trip_ns)
        self._next_bytes = min(FIRST_BYTES, most_bytes)
        self.bytes_per_second = 0
        """The best rate that a frame has shown; 0 before the first."""

    def next_bytes(self) -> int:
        """Returns the size of the next frame; 0 if the rate is known well enough."""
        return self._next_bytes

    def took(self, nbytes: int, duration_ns: Nanoseconds) -> None:
        """Notes how long a frame took, with its echo."""
        duration_ns = max(1, duration_ns)
        rate = nbytes * NANOSECONDS_PER_SECOND // duration_ns
        self.bytes_per_second = max(self.bytes_per_second, rate, 1)
        self._left_bytes -= nbytes
        wanted = int(nbytes * _BEYOND * self._enough_ns / duration_ns)
        grown = min(wanted, _GROWTH * nbytes, LARGEST_BYTES, self._left_bytes)
        # A frame that is smaller than the last one would say nothing new.
        is_known = duration_ns >= self._enough_ns or grown < nbytes
        self._next_bytes = 0 if is_known else grown
