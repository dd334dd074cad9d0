"""Folders of temporary files that are removed even where their process was killed.

A process that is killed cannot clean up. Its folders stay unlocked behind it, and whoever makes the
next folder of the same kind removes them first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class ScratchFolder:
    """A folder of temporary files, which is removed when it is closed or its process has ended.

    It is locked with `flock` for as long as it lives, so the kernel says whether its process does.
    On a file system without such locks folders of killed processes stay where they are.
    """

    def __init__(self, prefix: str, into: Path | None = None) -> None:
        """Makes an empty folder that only this user can enter.

        Args:
            prefix: The beginning of its name, one for each kind of folder.
            into: The folder that it is made in; None for that of temporary files.

        Raises:
            OSError: It cannot be made.
        """
        parent = into or Path(tempfile.gettempdir())
        sweep(parent, prefix)
        while True:
            self._folder = tempfile.TemporaryDirectory(
                prefix=prefix, dir=parent, ignore_cleanup_errors=True
            )
            self.path = Path(self._folder.name)
            try:
                self._descriptor = _opened(self.path)
                if _is_locked_and_there(self._descriptor, self.path):
                    return
                os.close(self._descriptor)
            except FileNotFoundError:
                pass
            # Another process found it before it was locked, and took it for an abandoned one.
            self._folder.cleanup()

    def close(self) -> None:
        """Removes the folder and all that is in it."""
        self._folder.cleanup()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(parent: Path, prefix: str) -> None:
    """Removes this user's folders in `parent` of which the process has ended."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            descriptor = _opened(folder)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(descriptor)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_locked_and_there(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here, so nobody sweeps here either
        return True
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
