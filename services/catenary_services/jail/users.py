"""A temporary user for each jailed process: a number nobody has, with no process left behind."""

from __future__ import annotations

import os
import pwd
import random
import signal
import stat
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_HIGH = (0x6000_0000, 0x6FFF_FFFF)
_LOW = (61_184, 65_519)
"""Numbers that systemd gives to dynamic users, for containers that map only 65 536 of them."""
_TIMEOUT_S = 5.0


def free_uid() -> int | None:
    """Returns the number of a user that does not exist here, None if no such number is mapped."""
    for low, high in (_HIGH, _LOW):
        if not _is_mapped(low, high):
            continue
        for _ in range(100):
            uid = random.randint(low, high)
            try:
                pwd.getpwuid(uid)
            except KeyError:
                if not _processes_of(uid):
                    return uid
    return None


def is_open_to_all(inputs: Iterable[Path], folder: Path) -> bool:
    """Returns True if an unknown user may run Python, read the inputs and reach `folder`."""
    code = [Path(sys.executable).resolve(), *(Path(entry) for entry in sys.path if entry)]
    there = [path.resolve() for path in (*code, *inputs) if path.exists()]
    return _is_reachable(folder.resolve()) and all(_is_readable(path) for path in there)


def end_all_of(uid: int) -> None:
    """Kills every process of a user repeatedly, until one that keeps forking has lost the race."""
    deadline = time.monotonic() + _TIMEOUT_S
    while (pids := _processes_of(uid)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _is_mapped(low: int, high: int) -> bool:
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return False
    ranges = [(int(line.split()[0]), int(line.split()[2])) for line in lines]
    return any(start <= low and high < start + count for start, count in ranges)


def _is_reachable(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)


def _is_readable(path: Path) -> bool:
    mode = path.stat().st_mode
    if not _is_reachable(path) or not mode & stat.S_IROTH:
        return False
    if not stat.S_ISDIR(mode):
        return True
    # All files in a model's folder count; code is installed as a whole.
    files = [entry for entry in path.iterdir() if entry.is_file()]
    return bool(mode & stat.S_IXOTH) and all(e.stat().st_mode & stat.S_IROTH for e in files)


def _processes_of(uid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == uid:
                    found.append(int(entry.name))
    return found
