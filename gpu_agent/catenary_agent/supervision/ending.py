"""How an agent's process ends when it cannot compute any more: told, logged, and whatever hangs.

An orderly stop would wait for the very thread or device that does not answer. So the process says
what it can within a second, and is gone; its supervisor starts it anew.
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
"""The device failed in a way this process cannot recover from."""
EXIT_STUCK = 71
"""A step did not end: found by our own watchdog, or by the scheduler's."""
_FAREWELL_S = 1.0

Farewell = Callable[[str, str], Awaitable[None]]
"""Tells others the reason, one of the error tree, and why, in words; run on the event loop."""


class Ending:
    """Ends the process once, whoever asks first. Any thread may."""

    def __init__(self, farewell: Farewell, exit_now: Callable[[int], object] = os._exit) -> None:
        """Says farewell, then calls `exit_now` with the exit code."""
        self._farewell = farewell
        self._exit_now = exit_now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Farewells are said on the running event loop."""
        self._loop = asyncio.get_running_loop()

    @property
    def has_begun(self) -> bool:
        """True from the first call of `begin`."""
        return self._begun.is_set()

    def begin(self, code: int, reason: str, why: str) -> None:
        """Has the process end within a second or so; returns at once."""
        with self._lock:
            if self._begun.is_set():
                return
            self._begun.set()
        try:
            threading.Thread(
                target=self._end, args=(code, reason, why), name="ending", daemon=True
            ).start()
        except RuntimeError:  # no thread is to be had: there is nothing left to be orderly with
            self._exit_now(code)

    def _end(self, code: int, reason: str, why: str) -> None:
        # Whatever goes wrong with saying so, the end comes: the loop hangs as well, or has ended;
        # nobody reads what is logged any more.
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
