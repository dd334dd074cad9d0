"""The path of a request: the files and functions that it enters in the processes of a cluster.

A recording of one request also has what a process happened to do meanwhile: heartbeats, a report
that is due once a second. So a request is sent many times, each time followed by a recording of as
long without one. Its path is what most recordings have beyond those without a request, however long
a busy machine makes them. What follows a request too late for its own recording is in the next one.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from build_native import MYPYC
from source_roots import IMPORT_PATH

HOOK = Path(__file__).parent / "entered_functions"
SETTLE_S = 0.1
"""Time after the answer in which the request's end is reported to the scheduler, counted and written
to Redis, on a busy machine as well."""
_ANSWERS_S = 20.0


def traced_environment(folder: Path) -> dict[str, str]:
    """Returns the variables with which processes can be traced; they record below `folder`."""
    return {
        "PYTHONPATH": os.pathsep.join((str(HOOK), IMPORT_PATH)),
        "ENTERED_FUNCTIONS": str(folder),
        "CATENARY_PURE": "1",
    }


@dataclass(frozen=True)
class RequestPath:
    """The functions, as `file:function`, that a request enters, by the name of the process."""

    functions: Mapping[str, frozenset[str]]

    def files(self, process: str | None = None) -> set[str]:
        """Returns the files of one process, or of all, without those that `make native` compiles.

        What is compiled is the scheduler's brain, which has budgets of its own: of time.
        """
        chosen = self.functions.values() if process is None else (self.functions[process],)
        entered = {name.partition(":")[0] for names in chosen for name in names}
        return entered.difference(MYPYC)

    def __str__(self) -> str:
        lines = [f"{len(self.files())} files in {len(self.functions)} processes"]
        for process, names in self.functions.items():
            files = sorted(self.files(process))
            of = {
                file: sorted(n.partition(":")[2] for n in names if n.startswith(f"{file}:"))
                for file in files
            }
            lines.append(f"{process}: {len(files)} files, {sum(map(len, of.values()))} functions")
            lines += [f"  {file}: {', '.join(entered)}" for file, entered in of.items()]
        return "\n".join(lines)


class PathTracer:
    """Records the requests to a cluster whose processes have the `traced_environment`."""

    def __init__(self, folder: Path, pids: Mapping[str, int]) -> None:
        self._folder = folder
        self._pids = pids

    def path_of(self, request: Callable[[], object], times: int) -> RequestPath:
        """Returns what most of `times` requests enter, sent one after the other."""
        counts: dict[str, Counter[str]] = {name: Counter() for name in self._pids}
        for _ in range(times):
            began_s = time.monotonic()
            for name, entered in self._record(request).items():
                counts[name].update(entered)
            lasted_s = time.monotonic() - began_s
            for name, entered in self._record(partial(time.sleep, lasted_s)).items():
                counts[name].subtract(entered)
        return RequestPath(
            {
                name: frozenset(each for each, seen in of.items() if 2 * seen > times)
                for name, of in counts.items()
            }
        )

    def _record(self, request: Callable[[], object]) -> dict[str, list[str]]:
        self._tell_all(signal.SIGUSR1, ".begun")
        request()
        time.sleep(SETTLE_S)
        self._tell_all(signal.SIGUSR2, ".entered")
        return {
            name: self._file(pid, ".entered").read_text().splitlines()
            for name, pid in self._pids.items()
        }

    def _tell_all(self, number: signal.Signals, suffix: str) -> None:
        files = [self._file(pid, suffix) for pid in self._pids.values()]
        for file in files:
            file.unlink(missing_ok=True)
        for pid in self._pids.values():
            os.kill(pid, number)
        end_s = time.monotonic() + _ANSWERS_S
        while not all(file.exists() for file in files):
            assert time.monotonic() < end_s, f"a process does not answer to {number.name}"
            time.sleep(0.001)

    def _file(self, pid: int, suffix: str) -> Path:
        return self._folder / f"{pid}{suffix}"
