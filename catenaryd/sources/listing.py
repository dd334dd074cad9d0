"""The files of a source with sizes and digests, before anything of it is fetched."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from catenary_services.content.record import machine
from catenary_services.errors import InvalidInput
from catenaryd.sources.source_names import ModelSource

MOST_FILES = 10_000
Told = Callable[[int], None]
"""Called with a number of bytes that came."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file that a source offers, with the size and the digests that the source states."""

    path: str
    size: int
    sha256: str = ""
    """The digest that the source names; empty if it names none."""
    git_sha1: str = ""
    """The digest that git names of a file it keeps itself; empty if there is none."""
    stamp: str = ""
    """An ETag or a time, which changes when the file does."""


class FileTransport(Protocol):
    """Brings in the files of a source."""

    def append(self, file: ListedFile, into: BinaryIO, told: Told) -> None:
        """Writes a file from the position of `into` on, which has what is before it.

        Raises:
            CatenaryError: Not all of it came; what came is in `into`.
        """
        ...

    def local(self, file: ListedFile) -> Path | None:
        """Returns where this machine has the file already; None if it has not."""
        ...


@dataclass(frozen=True, slots=True)
class SourceListing:
    """The files of one revision of a source."""

    source: ModelSource
    revision: str
    files: tuple[ListedFile, ...]
    transport: FileTransport | None = field(default=None, compare=False)
    """Brings the files in; None for files that lie on this machine."""


def revision_of(files: Iterable[ListedFile]) -> str:
    """Returns a digest that changes when names, sizes or times of files do."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda each: each.path):
        digest.update(f"{file.path}\0{file.size}\0{file.stamp}\0".encode())
    return digest.hexdigest()[:16]


def list_folder(source: ModelSource) -> SourceListing:
    """Returns the files of a folder of this machine, or the one file that a path names.

    Raises:
        InvalidInput: There is no such path, it cannot be read, or it has too many files.
    """
    path = Path(source.place)
    try:
        if path.is_file():
            # The files beside it may be its weights.
            files = [_listed(path.parent, each) for each in path.parent.iterdir() if each.is_file()]
        elif path.is_dir():
            files = [_listed(path, each) for each in _files_of(path)]
        else:
            raise InvalidInput("source", f"{path} does not exist on {machine()}")
    except OSError as error:
        why = f"{path} cannot be read on {machine()}: {error.strerror or error}"
        raise InvalidInput("source", why) from error
    return SourceListing(source, "", tuple(files))


def _files_of(folder: Path) -> Iterable[Path]:
    found = []
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = [name for name in folders if not name.startswith(".") and depth < 2]
        found += [Path(place) / name for name in names if (Path(place) / name).is_file()]
        if len(found) > MOST_FILES:
            raise InvalidInput("source", f"{folder} has more than {MOST_FILES} files")
    return found


def _listed(folder: Path, path: Path) -> ListedFile:
    status = path.stat()
    name = path.relative_to(folder).as_posix()
    return ListedFile(name, status.st_size, stamp=str(status.st_mtime_ns))
