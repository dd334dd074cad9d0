"""Supervision of the processes of a local cluster: start, watch, restart and drain.

Each child runs in a session of its own, so that Ctrl-C reaches only the supervisor, which then
drains the children in order. Children ask the kernel to end them if the supervisor is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catenary_services.log import get_logger

log = get_logger(__name__)

FIRST_RESTART_DELAY_S = 0.1
LONGEST_RESTART_DELAY_S = 5.0
STABLE_AFTER_S = 10.0
"""Seconds after which a child that ends is started again with the shortest delay."""


@dataclass(slots=True)
class ChildProcess:
    """One supervised process: `catenaryd <arguments>`."""

    name: str
    arguments: Sequence[str]
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides those of the supervisor."""
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    stopping: bool = False
    _task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int | None:
        """Id of the running process, None between two runs."""
        return self.process.pid if self.process and self.process.returncode is None else None

    async def start(self) -> None:
        """Starts the process, and the task that restarts it when it ends unasked."""
        await self._spawn()
        self._task = asyncio.create_task(self._watch(), name=f"watch-{self.name}")

    async def _spawn(self) -> None:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "catenaryd",
                "--supervised",
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    async def _watch(self) -> None:
        delay_s = FIRST_RESTART_DELAY_S
        while True:
            assert self.process is not None
            started = time.monotonic()
            code = await self.process.wait()
            if self.stopping:
                return
            if time.monotonic() - started >= STABLE_AFTER_S:
                delay_s = FIRST_RESTART_DELAY_S
            self.restarts += 1
            log.warning("child_ended", child=self.name, exit_code=code, restart_in_s=delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, LONGEST_RESTART_DELAY_S)
            if self.stopping:
                return
            await self._spawn()

    async def stop(self, timeout_s: float) -> None:
        """Asks the process to drain and end; kills it after `timeout_s`."""
        self.stopping = True
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), timeout_s)
            except TimeoutError:
                log.warning("child_killed", child=self.name, after_s=timeout_s)
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def last_line(self) -> str:
        """Returns the last error line in the child's log, for an error message."""
        if not self.log_file.exists():
            return "it left no log"
        lines = self.log_file.read_text(errors="replace").splitlines()
        complaints = [line for line in lines if "[error" in line or "[" not in line[:60]]
        return (complaints or lines or [""])[-1]


def end_with_parent() -> None:
    """Asks the kernel to send SIGTERM to this process when its parent dies (Linux)."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
