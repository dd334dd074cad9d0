"""A server with all its processes: started, told apart from others, measured, ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.end_to_end import cpu_ns

_MARK = "CATENARY_PEER"
_ENDS_WITHIN_S = 8.0
_SETTLES_WITHIN_S = 20.0
_IDLE_NS = 100_000_000
"""CPU time in a second below which a server counts as idle."""
_OUTPUT_LINES = 15


class ServerProcesses:
    """The processes of one server.

    They are found as descendants of the first one, and by a mark in their environment: servers have
    processes whose parent has ended.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self._log = log
        with log.open("wb") as output:
            self._first = subprocess.Popen(
                words,
                env={**environment, name: value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        """True once the first process has ended."""
        return self._first.poll() is not None

    def last_lines(self) -> str:
        """Returns the end of what the server has printed."""
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return "\n".join(lines[-_OUTPUT_LINES:])

    def all(self) -> list[psutil.Process]:
        """Returns every living process of the server."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._first.pid)
            found = {each.pid: each for each in (first, *first.children(recursive=True))}
        for each in psutil.process_iter():
            if each.pid not in found and self._mark.encode() in _environment(each.pid):
                found[each.pid] = each
        return [each for each in found.values() if _lives(each)]

    def cpu_ns(self, processes: Sequence[psutil.Process]) -> int:
        """Returns the CPU time that some of these processes have used together."""
        total = 0
        for each in processes:
            with contextlib.suppress(OSError):  # it has ended since
                total += cpu_ns(each.pid)
        return total

    def wait_until_idle(self) -> None:
        """Returns when what the processes do by themselves after a start is over.

        That is a second in which they take less than a tenth of a core, or `_SETTLES_WITHIN_S`
        seconds, as some servers never rest.
        """
        end_s = time.monotonic() + _SETTLES_WITHIN_S
        while time.monotonic() < end_s:
            processes = self.all()
            before = self.cpu_ns(processes)
            time.sleep(1.0)
            if self.cpu_ns(processes) - before < _IDLE_NS:
                return

    def memory_bytes(self) -> int:
        """Returns the resident memory of all processes; what they share counts in each of them."""
        total = 0
        for each in self.all():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss
        return total

    def stop(self) -> None:
        """Ends all processes: the first by SIGTERM, then whatever is left by it and by SIGKILL."""
        left = self.all()
        if not self.ended:
            self._first.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._first.wait(_ENDS_WITHIN_S)
        for end in (psutil.Process.terminate, psutil.Process.kill):
            left = self._left(left)
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(each)  # psutil makes sure that the id is still that process's
            psutil.wait_procs(left, _ENDS_WITHIN_S)
        self._first.wait()

    def _left(self, known: Sequence[psutil.Process]) -> list[psutil.Process]:
        """Returns the living processes, with those of the known that have lost parent and mark."""
        return [each for each in {*known, *self.all()} if _lives(each)]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def environment_for(folder: Path, **more: str) -> dict[str, str]:
    """Returns the environment of a server: one thread for arithmetic, and a home of its own."""
    kept = {name: os.environ[name] for name in ("LANG", "TZ") if name in os.environ}
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    usual = {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"}
    return {**kept, **usual, **more}
