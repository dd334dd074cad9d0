"""The thread of generation: it handles events, computes a step, and hands over the output.

Only this thread touches the generation loop, so no locks are needed, and the next step begins
without waiting for the event loop, which sends frames meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from catenary_agent.generation.state.events import LoopCall

if TYPE_CHECKING:
    from catenary_agent.generation.loop.generation_loop import GenerationLoop
    from catenary_agent.generation.state.events import Event, LoopOutput

_NS = 1e-9

T = TypeVar("T")


class GenerationLoopThread:
    """Drives a generation loop.

    Invariants: events are handled in the order they were posted, all of them between two steps. The
    output of one step is handed over before the next step begins.
    """

    def __init__(
        self,
        generation_loop: GenerationLoop,
        clock: Callable[[], int],
        flush: Callable[[LoopOutput], None],
    ) -> None:
        """Calls `flush` on the event loop with the output of `generation_loop`."""
        self._generation_loop = generation_loop
        self._clock = clock
        self._flush = flush
        # Bounded by those who post: rows by the bytes the engine holds, the rest by open sessions.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._calls: set[asyncio.Future[Any]] = set()
        self.crashed: asyncio.Future[None] | None = None
        """Receives the exception if the thread crashes, which is a bug; None before `start`."""

    def start(self) -> None:
        """Starts the thread; its output goes to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.crashed = self._loop.create_future()
        self._thread.start()

    def post(self, event: Event) -> None:
        """Queues an event; may be called on any thread."""
        self._events.put(event)

    def call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work` on the thread between two steps; calls run in the order of asking."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def settle(result: T, error: Exception | None) -> None:
            if future.done():  # cancelled meanwhile
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def done(result: T, error: Exception | None) -> None:
            self.on_loop(settle, result, error)

        self.post(LoopCall(work, done))
        return future

    async def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the current step; False if that takes over `timeout_s`."""
        if self._thread.ident is None:
            return True
        self._events.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        await asyncio.sleep(0)  # lets the callbacks run that the thread has scheduled
        for call in self._calls:
            call.cancel()
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            while not self._stopping:
                self._take_in()
                self._generation_loop.expire()
                if self._generation_loop.is_ready:
                    self._generation_loop.step()
                self._hand_on()
            self._generation_loop.close()
        except BaseException as error:
            self.on_loop(self._note_crash, error)
        finally:
            self._hand_on()

    def _take_in(self) -> None:
        """Handles all queued events; waits for one if there is nothing to compute."""
        try:
            if not self._generation_loop.is_ready:
                wakeup = self._generation_loop.next_wakeup_ns()
                if wakeup is None:
                    self._handle(self._events.get())
                else:
                    left_s = max(0.0, (wakeup - self._clock()) * _NS)
                    self._handle(self._events.get(timeout=left_s))
            while True:
                self._handle(self._events.get_nowait())
        except queue.Empty:
            pass

    def _handle(self, event: Event | None) -> None:
        if event is None:
            self._stopping = True
        else:
            self._generation_loop.handle(event)

    def _hand_on(self) -> None:
        outflow = self._generation_loop.take_outflow()
        if outflow:
            self.on_loop(self._flush, outflow)

    def on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        """Schedules a call on the event loop, behind all that were scheduled before."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(call, *arguments)

    def _note_crash(self, error: BaseException) -> None:
        assert self.crashed is not None
        if not self.crashed.done():
            self.crashed.set_exception(error)
            self.crashed.exception()  # marks it as retrieved; nobody may be waiting for it
