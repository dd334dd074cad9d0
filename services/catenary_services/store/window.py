"""Limits of what a peer is asked for, at a time and a second: fetching gives way to live traffic.

The rule of the window is LEDBAT's (RFC 6817): the time an answer takes beyond the shortest one of
late is time in queues. Below a target the window grows by an amount proportional to the difference;
above it shrinks, by up to a half in each round of answers, as in LEDBAT++. Requests of users that
fill a link lengthen its queue, and fetching recedes.
"""

from __future__ import annotations

from collections import deque

TARGET_NS = 60_000_000
"""The queueing time that fetching adds at most by itself, once the window has settled."""
MOST_PIECES = 64
_GAIN = 1.0
"""Pieces by which the window grows in one round of answers without queueing."""
_SHRINKS = 0.5
"""The largest part of the window that is lost in one round of answers."""
_MINUTES = 5
_MINUTE_NS = 60_000_000_000
"""The base time is the shortest answer of the last minutes, since routes and hosts change."""


class FetchWindow:
    """The number of pieces that may be asked of one peer at a time."""

    def __init__(self) -> None:
        self._size = 2.0
        self._shortest: deque[tuple[int, int]] = deque()
        """The shortest answer of each of the last minutes: minute and nanoseconds."""

    @property
    def pieces(self) -> int:
        """The number of pieces, at least 1."""
        return int(self._size)

    def answered(self, took_ns: int, now_ns: int) -> None:
        """Takes note of an answer that took `took_ns` from the request to its last byte."""
        minute = now_ns // _MINUTE_NS
        if self._shortest and self._shortest[-1][0] == minute:
            took_least = min(self._shortest[-1][1], took_ns)
            self._shortest[-1] = (minute, took_least)
        else:
            self._shortest.append((minute, took_ns))
        while self._shortest[0][0] <= minute - _MINUTES:
            self._shortest.popleft()
        queued_ns = took_ns - min(shortest for _, shortest in self._shortest)
        off_target = max(-1.0, (TARGET_NS - queued_ns) / TARGET_NS)
        if off_target >= 0:
            self._set(self._size + _GAIN * off_target / self._size)
        else:
            self._set(self._size + _SHRINKS * off_target)

    def lost(self) -> None:
        """Halves the window after a request that was not answered."""
        self._set(self._size / 2)

    def _set(self, size: float) -> None:
        self._size = min(float(MOST_PIECES), max(1.0, size))


class ByteRate:
    """A limit of bytes a second, kept by waiting before each piece."""

    def __init__(self, bytes_per_s: int) -> None:
        """Lets `bytes_per_s` pass; 0 for any number."""
        self._bytes_per_s = bytes_per_s
        self._free_ns = 0
        """The moment at which the pieces so far have passed."""

    def wait_ns(self, nbytes: int, now_ns: int) -> int:
        """Lets a piece pass, and returns the nanoseconds that it has to wait for its turn."""
        if not self._bytes_per_s:
            return 0
        turn_ns = max(now_ns, self._free_ns)
        self._free_ns = turn_ns + nbytes * 1_000_000_000 // self._bytes_per_s
        return turn_ns - now_ns
