"""Making of a version aside, so that no process sees half a model, and of the files in it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository

STAGING_PREFIX = ".importing-"
"""The beginning of the names of hidden folders in which versions are made."""
_PUBLIC_MODE = 0o755
_PIECE_BYTES = 1 << 24
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_READABLE_BY_ALL = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


@contextmanager
def staged(repository: ModelRepository, key: ModelKey) -> Iterator[ModelRepository]:
    """Yields a hidden repository, whose version `key` appears in `repository` when the block ends.

    If somebody else made the version meanwhile, theirs stays. If the block fails, nothing appears.
    """
    root = repository.root
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=root) as scratch:
        made = ModelRepository(Path(scratch))
        made.root.chmod(_PUBLIC_MODE)  # the jail's user, if it has one of its own, reads in there
        yield made
        target = repository.folder(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            made.folder(key).rename(target)
        except OSError:
            if not target.exists():
                raise  # nobody else was first: it is a real failure


def link_or_copy(source: Path, target: Path, *, copies: bool = False) -> None:
    """Makes a file appear at another place: as a link where that is safe, else as a copy.

    It is safe if the file is owned by this user, readable by everybody and writable by nobody else.
    A copy is owned by this user and readable by everybody.

    Args:
        source: The file.
        target: The place, where nothing is yet.
        copies: Whether it is copied in any case.
    """
    if copies or not _linked(source.resolve(), target):
        _copy(source, target)


def _linked(source: Path, target: Path) -> bool:
    """Makes a hard link; returns False where that would be unsafe or impossible."""
    status = source.stat()
    mode = status.st_mode
    open_to_all = mode & _READABLE_BY_ALL == _READABLE_BY_ALL
    if status.st_uid != os.geteuid() or mode & _WRITABLE_BY_OTHERS or not open_to_all:
        return False
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as file, target.open("xb") as copy:
        os.fchmod(copy.fileno(), 0o644)
        while piece := file.read(_PIECE_BYTES):
            copy.write(piece)
