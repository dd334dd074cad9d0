"""Runs scenarios on real processes, in a folder of their own, and leaves no process behind."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from catenary_services.log import configure_logging

Found = TypeVar("Found")


def on_processes(serve: Callable[[Path], Coroutine[Any, Any, Found]]) -> Found:
    """Returns the findings of `serve`, which is given an empty folder for the processes' files."""
    configure_logging("simulate", "local", "error", False)
    with tempfile.TemporaryDirectory(prefix="catenary-live-") as folder:
        return asyncio.run(until_told(serve(Path(folder))))


async def until_told(done: Coroutine[Any, Any, Found]) -> Found:
    """Awaits `done`; SIGTERM ends it like Ctrl-C, so that no process of the cluster stays."""
    task = asyncio.ensure_future(done)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
