"""The lifecycle of every process: start, drain and stop, driven by signals.

The first SIGTERM or SIGINT drains the process (it is no longer ready, and finishes or hands back
its work), then stops it. A second one stops it at once. Every step has a deadline, so that no
supervisor has to kill a process that hangs in one.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import uvloop

from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger
from catenary_services.memory import keep_freed_memory

STOP_TIMEOUT_S = 10.0
"""Seconds that `stop` may take before the process ends with exit code 1."""

_LOGGED_TASKS = 20
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = get_logger("catenary_services.lifecycle")


class Process(Protocol):
    """A gateway, a scheduler, an agent, or several of them in one operating-system process."""

    @property
    def name(self) -> str:
        """Name of the process in log lines, e.g. "agent-0"."""
        ...

    async def start(self) -> None:
        """Returns when the process is ready; raises if it never will be."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Takes no new work, and finishes or hands back the rest within `timeout_s`."""
        ...

    async def stop(self) -> None:
        """Frees everything. It is called exactly once, also after a failed or interrupted start."""
        ...


@runtime_checkable
class FailureReporter(Protocol):
    """A process that can notice that it cannot go on."""

    async def failed(self) -> None:
        """Waits until the process cannot go on, then raises the cause; never returns."""
        ...


class _Signals:
    """Counts stop signals while it is installed."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> _Signals:
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def run_until_signal(
    process: Process, drain_timeout_s: float, on_ready: Callable[[], None] | None = None
) -> int:
    """Runs `process` until a stop signal or its failure, and returns the exit code.

    Args:
        process: Anything with start, drain and stop; if it also has `failed`, that is watched.
        drain_timeout_s: The longest time to drain.
        on_ready: Called once, when `start` has returned.

    Returns:
        0 after a signal, 1 if the process failed to start, failed later, or did not stop in time.
    """
    with _Signals() as signals:
        code = 0
        try:
            if await _unless(signals.first, process.start()):
                _calm_garbage_collector()
                _log.info("ready", name=process.name)
                if on_ready is not None:
                    on_ready()
                await _unless(signals.first, _failure_of(process))
                _log.info("draining", name=process.name)
                await _drain(process, drain_timeout_s, signals.second)
        except Exception as error:
            code = 1
            # Errors of the tree are for the operator; any other is a bug and needs its traceback.
            _log.error(
                "process_failed",
                name=process.name,
                error=str(error),
                exc_info=not isinstance(error, CatenaryError),
            )
        finally:
            code = max(code, await _stop(process))
        _log.info("stopped", name=process.name, exit_code=code)
        return code


def run_process(
    process: Process, drain_timeout_s: float, on_ready: Callable[[], None] | None = None
) -> int:
    """Runs `process` on a uvloop event loop of its own; see `run_until_signal`."""
    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_until_signal(process, drain_timeout_s, on_ready))


def _calm_garbage_collector() -> None:
    """Excludes what start-up built from all later collections, and collects less often.

    A process that has imported and loaded everything holds some hundred thousand objects that live
    until its end; scanning them again and again costs a request a few per cent.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


async def _failure_of(process: Process) -> None:
    if isinstance(process, FailureReporter):
        await process.failed()
    else:
        await asyncio.Event().wait()


async def _unless(interrupt: asyncio.Event, work: Awaitable[None]) -> bool:
    """Awaits `work` unless `interrupt` is set first; returns True if the work ended.

    The exception of the work is raised.
    """
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(interrupt.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        await _cancel(task, waiter)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    unfinished = [task for task in tasks if not task.done()]
    for task in unfinished:
        task.cancel()
    if unfinished:
        # A task that ignores its cancellation must not keep the process alive.
        await asyncio.wait(unfinished, timeout=STOP_TIMEOUT_S)


async def _drain(process: Process, timeout_s: float, interrupt: asyncio.Event) -> None:
    with suppress(TimeoutError):
        # The process keeps this deadline by itself; the time-out is for one that does not.
        async with asyncio.timeout(timeout_s + 1.0):
            if not await _unless(interrupt, process.drain(timeout_s)):
                _log.warning("drain_interrupted", name=process.name)
            return
    _log.warning("drain_timed_out", name=process.name, timeout_s=timeout_s)


async def _stop(process: Process) -> int:
    stopping: asyncio.Task[None] = asyncio.create_task(process.stop())
    try:
        await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
        if not stopping.done():
            waiting = [_place_of(task) for task in _most_telling(stopping)]
            _log.error(
                "stop_timed_out", name=process.name, timeout_s=STOP_TIMEOUT_S, waiting=waiting
            )
            return 1
        stopping.result()
    except Exception as error:
        _log.error("stop_failed", name=process.name, error=str(error), exc_info=True)
        return 1
    finally:
        await _cancel(stopping)
    return 0


def _most_telling(stopping: asyncio.Task[None]) -> list[asyncio.Task[Any]]:
    """Returns the task of `stop` first, then as many others as a log line holds."""
    others = asyncio.all_tasks() - {stopping, asyncio.current_task()}
    return [stopping, *sorted(others, key=asyncio.Task.get_name)][:_LOGGED_TASKS]


def _place_of(task: asyncio.Task[Any]) -> str:
    """Returns where a task waits, innermost call last: "stop:96 > close:40 > wait:213"."""
    calls: list[str] = []
    awaited: Any = task.get_coro()
    while inspect.iscoroutine(awaited):
        frame = awaited.cr_frame
        calls.append(f"{awaited.__name__}:{frame.f_lineno if frame else '?'}")
        awaited = awaited.cr_await
    return " > ".join(calls)
