"""Taking over the files a jailed process left: plain files with plain names, within its limits."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from catenary_services.errors import InvalidInput
from catenary_services.jail.orders import JailLimit, JailLimits

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DEEPEST = 5
_PIECE_BYTES = 1 << 24


def left_behind(folder: Path, limits: JailLimits, subject: str) -> list[str]:
    """Returns the paths of the files below a folder, relative to it.

    Raises:
        InvalidInput: There is something other than plain files and folders, a name that is not
            plain, or more or larger files than the limits allow.
    """
    found, total = [], 0
    for path, status in _walk(folder, Path(), subject):
        total += status.st_blocks * 512
        found.append(str(path))
        if len(found) > limits.files or max(total, status.st_size) > limits.folder_bytes:
            raise refused(subject, "wrote more files, or larger ones, than it may")
    return found


def used_bytes(folder: Path) -> int:
    """Returns the bytes a folder takes on disk.

    A file that vanishes meanwhile counts as nothing.
    """
    total = 0
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total


def take_over(folder: Path, into: Path, wanted: tuple[str, ...], files: list[str]) -> None:
    """Moves files into `into`, where they belong to this user and everybody may read them.

    Raises:
        InvalidInput: A file matches no pattern in `wanted` (patterns of `fnmatch`).
    """
    for name in files:
        if not any(fnmatchcase(name, pattern) for pattern in wanted):
            raise refused(folder.name, f"wrote {name!r}, which nobody asked for")
    for name in files:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _move(folder / name, target)


def refused(subject: str, message: str) -> InvalidInput:
    """Returns the error for files that are not taken over."""
    error = InvalidInput(subject, message)
    error.details["limit"] = JailLimit.FILES
    return error


def _walk(folder: Path, inside: Path, subject: str) -> Iterator[tuple[Path, os.stat_result]]:
    with os.scandir(folder / inside) as entries:
        for entry in entries:
            path = inside / entry.name
            status = entry.stat(follow_symlinks=False)
            if not _NAME.fullmatch(entry.name) or len(path.parts) > _DEEPEST:
                raise refused(subject, f"wrote a file with the name {entry.name[:100]!r}")
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(folder, path, subject)
            elif stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                yield path, status
            else:
                raise refused(subject, f"left {str(path)!r}, which is no plain file")


def _move(source: Path, target: Path) -> None:
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.fchown(descriptor, os.geteuid(), os.getegid())
        os.fchmod(descriptor, 0o644)
        try:
            os.rename(source, target)
        except OSError:  # the target is on another file system
            with target.open("wb") as copy:
                while piece := file.read(_PIECE_BYTES):
                    copy.write(piece)
