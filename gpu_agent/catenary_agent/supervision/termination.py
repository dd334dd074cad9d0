"""The end of an agent's process that cannot compute any more: reported, logged and immediate.

An orderly stop would wait for the very thread or device that does not answer. Instead the process
reports what it can within a second and exits; its supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable

from catenary_services.log import get_logger

_log = get_logger("catenary_agent")

EXIT_DEVICE_LOST = 70
"""Exit code: the device failed in a way that this process cannot recover from."""
EXIT_STUCK = 71
"""Exit code: a step did not end, as found by the watchdog or the scheduler."""
_FAREWELL_S = 1.0

Farewell = Callable[[str, str], Awaitable[None]]
"""Coroutine function that tells others the reason (an error's name) and an explanation; it runs on
the event loop."""


class ProcessTermination:
    """Ends the process once, whoever asks first; any thread may ask."""

    def __init__(self, farewell: Farewell, exit_now: Callable[[int], object] = os._exit) -> None:
        """Awaits `farewell`, then calls `exit_now` with the exit code."""
        self._farewell = farewell
        self._exit_now = exit_now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Makes the running event loop the one that farewells run on."""
        self._loop = asyncio.get_running_loop()

    @property
    def has_begun(self) -> bool:
        """True from the first call of `begin` on."""
        return self._begun.is_set()

    def begin(self, code: int, reason: str, why: str) -> None:
        """Makes the process exit within a second or so; returns at once."""
        with self._lock:
            if self._begun.is_set():
                return
            self._begun.set()
        try:
            threading.Thread(
                target=self._end, args=(code, reason, why), name="ending", daemon=True
            ).start()
        except RuntimeError:  # no thread can be started, so an orderly farewell is impossible
            self._exit_now(code)

    def _end(self, code: int, reason: str, why: str) -> None:
        # The exit comes whatever fails before it: the event loop may hang as well or have ended,
        # and nobody may read the log any more.
        with contextlib.suppress(Exception):
            if self._loop is not None and not self._loop.is_closed():
                said = asyncio.run_coroutine_threadsafe(self._say(reason, why), self._loop)
                said.result(_FAREWELL_S)
        try:
            with contextlib.suppress(Exception):
                _log.error("process_ends", reason=reason, why=why, exit_code=code)
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            self._exit_now(code)

    async def _say(self, reason: str, why: str) -> None:
        await self._farewell(reason, why)
