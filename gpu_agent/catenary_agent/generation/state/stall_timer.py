"""A timer for things that may stand still: the one that was touched longest ago is due first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catenary_services.domain.ids import Nanoseconds


class StallTimer:
    """The moments at which each of some sessions last made progress."""

    def __init__(self, stall_timeout_ns: Nanoseconds) -> None:
        """Starts without sessions; each may stand still for `stall_timeout_ns`."""
        self.stall_timeout_ns = stall_timeout_ns
        self.since: OrderedDict[int, Nanoseconds] = OrderedDict()
        """Moment of the last progress of each session, the earliest first."""

    def __contains__(self, session_id: int) -> bool:
        return session_id in self.since

    def touch(self, session_id: int, now: Nanoseconds) -> None:
        """Starts or restarts the timeout of a session."""
        self.since[session_id] = now
        self.since.move_to_end(session_id)

    def drop(self, session_id: int) -> None:
        """Ends the timeout of a session, if there is one."""
        self.since.pop(session_id, None)

    def lost(self, now: Nanoseconds) -> Iterable[int]:
        """Removes the sessions whose timeout has passed, each when it is its turn."""
        return self._lost(now) if self.since else ()

    def _lost(self, now: Nanoseconds) -> Iterator[int]:
        while self.since and next(iter(self.since.values())) + self.stall_timeout_ns <= now:
            yield self.since.popitem(last=False)[0]

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns when `lost` has something to yield; None if never."""
        first = next(iter(self.since.values()), None)
        return None if first is None else first + self.stall_timeout_ns

    def __str__(self) -> str:
        return f"{self.stall_timeout_ns * 1e-9:g} s"
