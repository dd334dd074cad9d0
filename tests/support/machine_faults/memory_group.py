"""A control group of the kernel with a limit on the memory of the processes in it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVED_S = 10.0


@dataclass(frozen=True)
class MemoryGroup:
    """A group, in either version of the kernel's interface."""

    folder: Path
    names: tuple[str, str, str]
    """The files of its limit, of its present memory and of its kills."""

    def take(self, pid: int) -> None:
        """Moves a process into the group, where what it takes from now on counts."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def used_mb(self) -> float:
        return int((self.folder / self.names[1]).read_text()) / 1e6

    @property
    def kills(self) -> int:
        """The number of processes that the kernel has killed for their memory."""
        lines = (self.folder / self.names[2]).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@contextmanager
def memory_group(name: str, nbytes: int) -> Iterator[MemoryGroup | None]:
    """Makes a group within that of this process, for the length of the block.

    None where this user may make none, or where the kernel limits no memory by groups.
    """
    made = _made(name, nbytes)
    try:
        yield made
    finally:
        if made is not None:
            _remove(made.folder)


def _made(name: str, nbytes: int) -> MemoryGroup | None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {kind: place for _, kind, place in (line.split(":", 2) for line in lines)}
    if "memory" in own:  # the first version
        parent = _ROOT / "memory" / own["memory"].lstrip("/")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
    else:
        parent = _ROOT / own.get("", "/").lstrip("/")
        names = ("memory.max", "memory.current", "memory.events")
    folder = parent / f"{name}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        (folder / names[0]).write_text(str(nbytes))
    except OSError:  # no controller of memory here
        folder.rmdir()
        return None
    return MemoryGroup(folder, names)


def _remove(folder: Path) -> None:
    """Removes a group once its processes have ended."""
    end_s = time.monotonic() + _REMOVED_S
    while folder.exists() and time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
