"""The lag of a gateway's event loop, by which its answers may be late too."""

from __future__ import annotations

import asyncio

_EVERY_S = 0.1
_KEPT_LOOKS = 50
"""Number of measurements of one interval; the worst of the present and the last interval counts."""


class LoopLag:
    """A timer that measures how late it is called, from `start` to `stop`."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self._worst_s = self._worst_before_s = 0.0

    @property
    def worst_s(self) -> float:
        """The most seconds by which a timer was late in the last five to ten seconds."""
        return max(self._worst_s, self._worst_before_s)

    def start(self) -> None:
        """Starts the next measurement, on the running event loop."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + _EVERY_S
        self._timer = loop.call_at(due_s, self._look, loop, due_s)

    def stop(self) -> None:
        """Cancels the measurement under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.note(loop.time() - due_s)
        self.start()

    def note(self, late_s: float) -> None:
        """Records that a timer was `late_s` seconds late."""
        self._looks += 1
        if self._looks >= _KEPT_LOOKS:
            self._worst_before_s, self._worst_s, self._looks = self._worst_s, 0.0, 0
        self._worst_s = max(self._worst_s, late_s)
