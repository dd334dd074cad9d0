"""Deliberate faults, for tests only: a file makes steps of an agent hang, fail or slow down.

The file, named by the setting `faults_file`, is read before each step and may change or disappear
at any time; a hanging step continues when it does. It contains one JSON object:

    {"hang": true}
    {"fail": "text of the RuntimeError", "count": 3}
    {"slow": 3.0}

`fail` makes at most `count` steps fail (all, without it), none of which computes anything; a text
that mentions CUDA is classified like such an error (`catenary_agent.devices.device_errors`). `slow`
multiplies the duration of a step. These keys can be added to each of them:

    "after": 5              so many steps are spared first
    "during": "loading"     loading of partitions, not batches and sessions; "always": both
    "once": true            the file is deleted as the fault begins, so that the process which
                            takes this one's place is healthy; a step that hangs hangs for good
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from catenary_services.log import get_logger

_log = get_logger("catenary_agent.supervision.faults")

_LOOK_AGAIN_S = 0.02
_MOST_BYTES = 4_096
SERVING, LOADING, ALWAYS = "serving", "loading", "always"

T = TypeVar("T")
_Version = tuple[int, int, int]


@dataclass(slots=True)
class _Fault:
    """The content of the file, with counts reduced by the steps that were affected."""

    hang: bool = False
    fail: str = ""
    slow: float = 1.0
    count: float = float("inf")
    after: int = 0
    during: str = SERVING
    once: bool = False


class FaultInjector:
    """Runs steps with the faults that the file describes; without a file, unchanged."""

    def __init__(self, file: Path | None) -> None:
        """Reads `file` before each step; None for no faults."""
        self._file = file
        self.is_armed = file is not None
        """False if there are never any faults."""
        self._version: _Version | None = None
        self._fault: _Fault | None = None

    def run(self, work: Callable[[], T], during: str = SERVING) -> T:
        """Returns the result of `work`.

        Raises:
            RuntimeError: The fault is that the step fails.
        """
        fault = None if self._file is None else self._due(self._file, during)
        if fault is None:
            return work()
        if fault.hang:
            self._hang(fault)
        if fault.fail:
            fault.count -= 1
            raise RuntimeError(fault.fail)
        began_s = time.monotonic()
        result = work()
        time.sleep(max(0.0, (fault.slow - 1.0) * (time.monotonic() - began_s)))
        return result

    def _due(self, file: Path, during: str) -> _Fault | None:
        """Returns the fault that applies to this step; None if none does."""
        version = _version_of(file)
        if version != self._version:
            # A fault with `once` that has begun stays in force although its file is gone.
            begun = self._fault is not None and self._fault.once and version is None
            self._version = version
            if not begun:
                self._fault = None if version is None else _read(file)
        fault = self._fault
        if fault is None or fault.count <= 0 or fault.during not in (during, ALWAYS):
            return None
        if fault.after > 0:
            fault.after -= 1
            return None
        if fault.once and version is not None:
            with contextlib.suppress(OSError):
                file.unlink()
        return fault

    def _hang(self, fault: _Fault) -> None:
        _log.warning("fault_hangs")
        while fault.once or (self._file is not None and _version_of(self._file) == self._version):
            time.sleep(_LOOK_AGAIN_S)


def _version_of(file: Path) -> _Version | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(file: Path) -> _Fault | None:
    """Returns the fault in a file; None if the file is malformed or not completely written."""
    try:
        document = json.loads(file.read_bytes()[:_MOST_BYTES])
        fault = _Fault(**document)
        fault.slow, fault.count, fault.after = (
            float(fault.slow),
            float(fault.count),
            int(fault.after),
        )
    except (OSError, ValueError, TypeError) as error:
        _log.warning("faults_unreadable", error=str(error))
        return None
    _log.warning("fault_read", fault=str(fault))
    return fault
