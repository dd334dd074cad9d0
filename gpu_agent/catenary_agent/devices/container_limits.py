"""The limits of a container's control group (version 2 or 1) on memory and cores.

A container sees all cores and all memory of its machine. An agent that used these figures would
start too many threads, which then wait for each other's share of time, and would load partitions
until the kernel kills it.
"""

from __future__ import annotations

from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number of about this size or more."""


def memory_limit_bytes(root: Path = CONTROL_GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Returns the memory in bytes that this process's groups may use; None without a limit."""
    limits = [
        _number(folder / name)
        for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
        for folder in _folders(root, own, controller)
    ]
    return min((n for n in limits if n is not None and 0 < n < _NO_LIMIT_BYTES), default=None)


def core_limit(root: Path = CONTROL_GROUPS, own: Path = OWN_GROUPS) -> float | None:
    """Returns how many cores' time this process's groups may use; None without a limit."""
    limits: list[float] = []
    for folder in _folders(root, own, ""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            limits.append(int(quota) / int(period))
    for controller in ("cpu", "cpu,cpuacct"):
        for folder in _folders(root, own, controller):
            quota_us = _number(folder / "cpu.cfs_quota_us")
            period_us = _number(folder / "cpu.cfs_period_us")
            if quota_us and period_us and quota_us > 0:
                limits.append(quota_us / period_us)
    return min(limits, default=None)


def _folders(root: Path, own: Path, controller: str) -> list[Path]:
    """Returns the folders of a controller ("" for version 2): its root and that of this process."""
    folders = [root / controller] if controller else [root]
    for line in _text(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == controller or (controller and controller in controllers.split(",")):
            folders.append(folders[0] / path.lstrip("/"))
    return folders


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:  # no such file, or "max"
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
