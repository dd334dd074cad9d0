"""Transfer of weight files from a folder to the repository, as links or as copies.

The files are not read here. The jail has read their headers, and agents later compare every byte
with the version's content record.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

from catenary_agent.decoders.model_files.weights import is_own_file
from catenary_services.errors import InvalidInput

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\.safetensors")
_PIECE_BYTES = 1 << 24
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_READABLE_BY_ALL = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


def take_over(source: Path, folder: Path, names: Collection[str], *, copies: bool) -> None:
    """Brings files of a source into a folder of the repository.

    A file is linked if it is owned by this user, readable by everybody and writable by nobody else.
    A copy is owned by this user and readable by everybody. If somebody changes a linked file in
    place, the version no longer fits its content record, and no agent loads it.

    Args:
        source: The folder with the files.
        folder: The folder in the repository.
        names: The names of the files as reported by the jail, so they are not trusted.
        copies: Whether all files are copied.

    Raises:
        InvalidInput: A name is not that of a weight file in the source.
    """
    for name in sorted(names):
        if not _NAME.fullmatch(name) or not is_own_file(source, name):
            raise InvalidInput(source.name, f"has no file of weights called {name[:100]!r}")
        if copies or not _linked((source / name).resolve(), folder / name):
            _copy(source / name, folder / name)


def _linked(source: Path, target: Path) -> bool:
    """Makes a hard link; returns False where it would be unsafe or impossible."""
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
