"""Notes which functions of the project a process enters between two signals.

Python imports a module of this name at the start of every process that finds it in its PYTHONPATH;
`path_trace.py` puts it there. SIGUSR1 begins a recording and SIGUSR2 ends it: then a file of this
process holds the recorded functions, one `file:function` a line. Only sources are imported, because
a compiled module tells no profiler what it does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = next(up for up in Path(__file__).resolve().parents if (up / "pyproject.toml").exists())
FOLDER = os.environ.get("ENTERED_FUNCTIONS", "")
TIMERS = frozenset(
    {
        "run_periodic_tasks",
        "Authorizer.watch",
        "ConnectionWatcher._watch",
        "LoopLag._look",
        "GrpcServer._look",
    }
)
"""Functions that run again and again whether or not there are requests. What they enter is of no
request."""


class _Recorder:
    """The functions entered in all threads of this process while it is on."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / str(os.getpid())
        self._entered: set[CodeType] = set()
        self._is_on = False
        # Threads may start before a recording does, and nothing reaches into them later.
        threading.setprofile(self._entering)
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)

    def _entering(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call" and frame.f_code not in self._entered:
            caller: FrameType | None = frame
            while caller is not None:
                if caller.f_code.co_qualname in TIMERS:
                    return
                caller = caller.f_back
            self._entered.add(frame.f_code)

    def _begin(self, *_: object) -> None:
        self._entered = set()
        self._is_on = True
        sys.setprofile(self._entering)
        self._file.with_suffix(".begun").touch()

    def _end(self, *_: object) -> None:
        sys.setprofile(None)
        self._is_on = False
        lines = sorted({line for line in map(_line_of, self._entered.copy()) if line})
        scratch = self._file.with_suffix(".scratch")
        scratch.write_text("\n".join(lines))
        scratch.rename(self._file.with_suffix(".entered"))


def _line_of(code: CodeType) -> str:
    """Returns the file and the name of a function of the project, "" for any other code."""
    path = Path(code.co_filename)
    inner = code.co_name.startswith("<")  # a comprehension belongs to the function around it
    if inner or not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return ""
    if path.is_relative_to(ROOT / "tests"):
        return ""
    return f"{path.relative_to(ROOT)}:{code.co_qualname}"


def _sources_only(folder: str) -> FileFinder:
    place = Path(folder).resolve()
    if not place.is_relative_to(ROOT) or "site-packages" in place.parts:
        raise ImportError
    return FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES))


if FOLDER:
    sys.path_hooks.insert(0, _sources_only)
    sys.path_importer_cache.clear()
    _Recorder(Path(FOLDER))
