"""The fetched files of one model version: which of them, and which parts of them, are here.

What the store has put into a version's folder is marked by a subfolder `.fetched`, which has the
maps of the files' chunks, the digest of what is fetched (`content`), and two lock files: `lock` is
held by who begins to fetch the version, and `users` by every process that has some of it loaded;
its time is that of the last use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from catenary_services.content.keeping import write_durably
from catenary_services.content.record import FETCHED_FOLDER, ContentRecord, FileRecord
from catenary_services.store.chunk_map import ChunkMap, chunk_span, chunks_of

_LOCK, _USERS, _CONTENT = "lock", "users", "content"
_DROPPED = ".dropped-"
_MODE = 0o644


class KeptVersion:
    """A version of which files were fetched, wholly or in part."""

    def __init__(self, folder: Path, record: ContentRecord) -> None:
        """Looks at the version in `folder`, whose files are those of `record`."""
        self.folder = folder
        self.record = record

    def map_of(self, name: str) -> ChunkMap:
        """Returns the map of a file, given its path in the folder."""
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        place = self.folder / FETCHED_FOLDER / f"{digest}.map"
        return ChunkMap(place, self.folder / name, self.record.files[name])

    def missing(self, name: str, chunks: Iterable[int]) -> list[int]:
        """Returns those of some chunks of a file that are not here."""
        known = self.map_of(name)
        return [chunk for chunk in chunks if not known.is_here(chunk)]

    def bytes_here(self) -> tuple[int, int]:
        """Returns the bytes of the version that were fetched, and all that it has."""
        own = {name: file for name, file in self.record.files.items() if not file.derived}
        here = sum(
            chunk_span(file, chunk)[1]
            for name, file in own.items()
            for chunk in self.map_of(name).here()
        )
        return here, sum(file.size for file in own.values())

    def ranges_here(self, name: str) -> list[tuple[int, int]] | None:
        """Returns the ranges of a file that were fetched; None for a file made on this machine."""
        recorded = self.record.files[name]
        if recorded.derived:
            return None
        return [chunk_span(recorded, chunk) for chunk in self.map_of(name).here()]

    def is_here(self, name: str, offset: int, length: int) -> bool:
        """Returns True if a range of a file was fetched."""
        recorded, known = self.record.files[name], self.map_of(name)
        return all(known.is_here(chunk) for chunk in chunks_between(recorded, offset, length))


def chunks_between(recorded: FileRecord, offset: int, length: int) -> list[int]:
    """Returns the chunks of a file that overlap a range of it."""
    return [
        chunk
        for chunk in range(chunks_of(recorded))
        if _overlap(chunk_span(recorded, chunk), offset, length)
    ]


def is_kept(folder: Path) -> bool:
    """Returns True if the files in a version's folder were put there by the store."""
    return (folder / FETCHED_FOLDER).is_dir()


def is_own(folder: Path) -> bool:
    """Returns True if a version's folder has files that somebody else put there."""
    if is_kept(folder):
        return False
    try:
        # Hidden files are caches and scratch of agents.
        return any(not path.name.startswith(".") for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def begun(folder: Path) -> Iterator[None]:
    """Marks a version's folder as the store's, and keeps other processes from beginning it.

    Raises:
        OSError: The folder cannot be made.
    """
    (folder / FETCHED_FOLDER).mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / FETCHED_FOLDER / _LOCK, os.O_RDWR | os.O_CREAT, _MODE)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def begin_content(folder: Path, digest: str) -> None:
    """Notes which content is fetched, and forgets what came of another that was never complete.

    Raises:
        OSError: It cannot be written.
    """
    marks = folder / FETCHED_FOLDER
    try:
        is_same = (marks / _CONTENT).read_text() == digest
    except (OSError, ValueError):
        is_same = False
    if not is_same:
        for known in marks.glob("*.map"):
            known.unlink(missing_ok=True)
        write_durably(marks / _CONTENT, digest.encode())


def use(folder: Path) -> int:
    """Keeps a version from being dropped, and returns the file descriptor that ends it if closed.

    Raises:
        OSError: The version was dropped this moment.
    """
    path = folder / FETCHED_FOLDER / _USERS
    handle = os.open(path, os.O_RDWR | os.O_CREAT, _MODE)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(handle), path.stat()):
            raise FileNotFoundError(path)
        os.utime(handle)
    except BaseException:
        os.close(handle)
        raise
    return handle


def last_use(folder: Path) -> float:
    """Returns the moment at which a version was used last, in seconds of the system's clock."""
    try:
        return (folder / FETCHED_FOLDER / _USERS).stat().st_mtime
    except OSError:
        return time.time()  # it is being begun


def drop(folder: Path) -> bool:
    """Removes a fetched version; returns False if a process uses it, or begins to."""
    marks = folder / FETCHED_FOLDER
    with contextlib.ExitStack() as stack:
        for name in (_LOCK, _USERS):
            try:
                handle = os.open(marks / name, os.O_RDWR | os.O_CREAT, _MODE)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        gone = folder.with_name(f"{_DROPPED}{folder.name}-{os.getpid()}-{time.monotonic_ns()}")
        try:
            folder.rename(gone)
        except OSError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
    return True


def sweep(model_folder: Path) -> None:
    """Removes what a process that crashed while it dropped a version has left."""
    for gone in model_folder.glob(f"{_DROPPED}*"):
        shutil.rmtree(gone, ignore_errors=True)


def _overlap(span: tuple[int, int], offset: int, length: int) -> bool:
    begin, size = span
    return begin < offset + length and offset < begin + size
