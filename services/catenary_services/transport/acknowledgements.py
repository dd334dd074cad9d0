"""Which frames a connection is known to have carried, and when it carries nothing any more.

A push returns once its bytes are the kernel's, and the kernel of a sender whose packets get nowhere
repeats them for a quarter of an hour; keepalive is silent while something is unacknowledged. So
it is watched here whether what was sent is acknowledged: by the other side's kernel, which does so
however busy its process is, so that slow is never taken for cut. Pure: what the kernel knows, and
the time, are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from catenary_services.errors import PartitionLost

SILENT_S = 4.0
"""Nothing of what was sent was acknowledged for so long: several repetitions of it were lost."""
LOOK_S = 0.5

Lost = Callable[[PartitionLost], None]
"""Told that a frame may not have arrived."""


@dataclass(frozen=True, slots=True)
class SendQueueState:
    """What the kernel knows of one direction of a connection."""

    acknowledged: int
    """Bytes the other side's kernel has taken since the connection began."""
    queued: int
    """Bytes behind them, sent or not."""
    unanswered: bool
    """Some of them were sent. False while the other side has no room: that is its right."""
    handed_over: bool
    """The kernel has every byte that was written."""


class Acknowledgements:
    """The frames sent over one connection that may yet be lost.

    Invariant: what `take` returns are those not known to have arrived, in the order of `sent`.
    """

    def __init__(self, silent_ns: int) -> None:
        """Takes a connection for lost that acknowledges nothing for `silent_ns`."""
        self._silent_ns = silent_ns
        self._new: list[Lost] = []
        """Sent since the last look."""
        self._marked: deque[tuple[int, list[Lost]]] = deque()
        """They have arrived once so many bytes are acknowledged."""
        self._acknowledged = -1
        self._since_ns = 0
        """Something has been unanswered, and nothing acknowledged, since then."""

    def sent(self, lost: Lost) -> None:
        """A frame was written whole."""
        self._new.append(lost)

    def look(self, now_ns: int, seen: SendQueueState) -> bool:
        """Forgets what has arrived; True if the connection carries nothing any more."""
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
        """Returns whether there is nothing to look for until something is sent."""
        return not (self._new or self._marked or seen.queued) and seen.handed_over

    def take(self) -> list[Lost]:
        """Returns whom to tell if the connection ends now, and forgets them."""
        found = [each for _, group in self._marked for each in group] + self._new
        self._marked.clear()
        self._new = []
        return found
