"""Spaces out work that is due after every change, so that a hundred cost little more than one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from catenary_services.log import get_logger

_SHARE = 0.1
"""The most of this thread's time that the work takes while changes keep coming."""
_LONGEST_PAUSE_S = 0.5
_CHEAP_S = 0.01
"""Work that takes less CPU time than this follows every change at once, as in any small cluster:
others, who look at the cluster meanwhile, find it as it is wanted."""

_log = get_logger(__name__)


class PacedWork:
    """Work that is done at once after a change, unless it was done a moment ago.

    Bringing a cluster to what is wanted of it costs more, the more agents there are. When hundreds
    of them come at the same time, each is a change. Done for each of them, the work of all would
    grow with the square of their number; so after it was done it pauses, in proportion to the CPU
    time that it took unless that was little, and does what has become due meanwhile in one go.

    Args:
        work: The work. It may ask for itself again.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._timer: asyncio.TimerHandle | None = None
        self._rested_s = 0.0
        """Moment, on `time.monotonic`, from which on the work may be done at once."""
        self._is_busy = False
        """True from the beginning of the work until its messages have left."""
        self._is_asked = False
        """True if it was asked for while it was busy."""
        self._is_closed = False

    def ask(self) -> None:
        """Does the work now, or once it has paused for long enough."""
        if self._timer is not None or self._is_closed:
            return
        if self._is_busy:
            self._is_asked = True
            return
        pause_s = self._rested_s - time.monotonic()
        if pause_s <= 0:
            self._do()
        else:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._due)

    def close(self) -> None:
        """Drops what is due, and all that is asked for later. Idempotent."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _do(self) -> None:
        began_s = time.thread_time()
        self._is_busy = True
        try:
            self._work()
        finally:
            # Behind what the work has put into the loop: messages to every agent, as a rule.
            asyncio.get_running_loop().call_soon(self._done, began_s)

    def _done(self, began_s: float) -> None:
        spent_s = time.thread_time() - began_s
        pause_s = 0.0 if spent_s < _CHEAP_S else min(_LONGEST_PAUSE_S, spent_s * (1 / _SHARE - 1))
        self._rested_s = time.monotonic() + pause_s
        self._is_busy = False
        if self._is_asked and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._due)
        self._is_asked = False

    def _due(self) -> None:
        self._timer = None
        try:
            self._do()
        except Exception:
            _log.exception("paced_work_failed")
