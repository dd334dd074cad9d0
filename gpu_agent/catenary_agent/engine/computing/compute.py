"""The only thread that computes batches.

A thread with a short queue makes handing over a batch cost a few microseconds. The event loop keeps
at most one batch queued behind the running one, so that the thread continues without waiting for
the event loop. Until it has begun, that batch can be taken back in favour of a more urgent one.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ComputeThread(Generic[T]):
    """Runs jobs one after another and reports each on the event loop.

    Invariant: a job that was offered is either run and reported exactly once, or taken back.
    """

    def __init__(self, name: str, run: Callable[[T], None], done: Callable[[T], None]) -> None:
        """Calls `run(job)`, which must not raise, on the thread, then `done(job)` on the loop."""
        self._run = run
        self._done = done
        self._jobs: deque[T] = deque()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the thread; completions go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def offer(self, job: T) -> None:
        """Queues a job behind the running one."""
        self._jobs.append(job)
        self._tokens.put(True)

    def take_back(self, job: T) -> bool:
        """Removes a job that has not begun; returns False if it has."""
        # Both deque operations are atomic. The token that is left finds no job and is harmless.
        try:
            self._jobs.remove(job)
        except ValueError:
            return False
        return True

    async def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its current job; returns False if that takes too long."""
        self._jobs.clear()
        self._tokens.put(False)
        if self._thread.ident is None:
            return True
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        assert self._loop is not None
        while self._tokens.get():
            try:
                job = self._jobs.popleft()
            except IndexError:
                continue
            self._run(job)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._done, job)
            del job
