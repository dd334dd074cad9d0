"""How late this gateway's event loop has been lately, which is how late its answers may be."""

from __future__ import annotations

import asyncio

_EVERY_S = 0.1
_KEPT_LOOKS = 50
"""The worst of between so many looks and twice as many counts."""


class LoopLag:
    """Looks at the clock now and then, from `start` to `stop`."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self._worst_s = self._worst_before_s = 0.0

    @property
    def worst_s(self) -> float:
        """By how much a timer was late at most, in the last five to ten seconds."""
        return max(self._worst_s, self._worst_before_s)

    def start(self) -> None:
        """Begins to look, on the running loop."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + _EVERY_S
        self._timer = loop.call_at(due_s, self._look, loop, due_s)

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.note(loop.time() - due_s)
        self.start()

    def note(self, late_s: float) -> None:
        """Takes into account that a timer was so late."""
        self._looks += 1
        if self._looks >= _KEPT_LOOKS:
            self._worst_before_s, self._worst_s, self._looks = self._worst_s, 0.0, 0
        self._worst_s = max(self._worst_s, late_s)
