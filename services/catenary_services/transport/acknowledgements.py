"""Detection of connections that carry nothing any more, and of the frames that were lost with them.

A push returns once the kernel has its bytes. The kernel of a sender whose packets get nowhere
repeats them for a quarter of an hour, and keepalive is silent while something is unacknowledged.
Therefore the acknowledgements of what was sent are watched here. They come from the other side's
kernel, however busy its process is, so that a slow peer is never taken for a lost one. Pure: the
state of the kernel and the time are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from catenary_services.errors import PartitionLost

SILENT_S = 4.0
"""Seconds without an acknowledgement of sent bytes, after which several repetitions were lost."""
LOOK_S = 0.5

Lost = Callable[[PartitionLost], None]
"""A function that is told that a frame may not have arrived."""


@dataclass(frozen=True, slots=True)
class SendQueueState:
    """The kernel's state of the outgoing direction of a connection."""

    acknowledged: int
    """Bytes that the other side's kernel has taken since the connection began."""
    queued: int
    """Bytes behind them that this side's kernel holds, sent or not."""
    unanswered: bool
    """Whether some of these bytes were sent. False while the other side announces no room, which it
    may."""
    handed_over: bool
    """Whether the kernel has every byte that was written."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """The bytes on their way over a connection, and how they fare, as the kernel counts."""

    acknowledged: int
    """Bytes that the other side's kernel has taken since the connection began."""
    outstanding: int
    """Bytes that were pushed and not acknowledged, wherever they are."""
    round_trip_ns: int
    """The shortest round trip of the last minutes; 0 if none is known."""
    delivered_per_second: int
    """The rate at which the latest bytes were taken, 0 if none is known. It is too low where there
    was not enough to send; then it only rises."""


class Acknowledgements:
    """The frames sent over one connection that may yet be lost.

    Invariant: `take` returns those that are not known to have arrived, in the order of `sent`.
    """

    def __init__(self, silent_ns: int) -> None:
        """Takes a connection for lost that acknowledges nothing for `silent_ns`."""
        self._silent_ns = silent_ns
        self._new: list[Lost] = []
        """Frames sent since the last look."""
        self._marked: deque[tuple[int, list[Lost]]] = deque()
        """Frames, with the number of acknowledged bytes at which they have arrived."""
        self._acknowledged = -1
        self._since_ns = 0
        """Time since which something has been unanswered and nothing was acknowledged."""

    def sent(self, lost: Lost) -> None:
        """Notes that a frame was written whole; `lost` is called if it may not have arrived."""
        self._new.append(lost)

    def look(self, now_ns: int, seen: SendQueueState) -> bool:
        """Forgets frames that have arrived.

        Returns True if the connection carries nothing any more.
        """
        marked = self._marked
        while marked and marked[0][0] <= seen.acknowledged:
            marked.popleft()
        if self._new and seen.handed_over:
            if seen.queued:
                marked.append((seen.acknowledged + seen.queued, self._new))
            self._new = []
        if not seen.unanswered or seen.acknowledged != self._acknowledged:
            self._acknowledged = seen.acknowledged if seen.unanswered else -1
            self._since_ns = now_ns
            return False
        return now_ns - self._since_ns >= self._silent_ns

    def is_settled(self, seen: SendQueueState) -> bool:
        """Returns True if no further look is needed until something is sent."""
        return not (self._new or self._marked or seen.queued) and seen.handed_over

    def take(self) -> list[Lost]:
        """Returns and forgets the callbacks of frames that may be lost if the connection ends."""
        found = [each for _, group in self._marked for each in group] + self._new
        self._marked.clear()
        self._new = []
        return found
