"""SHA-256 digests of files and their chunks, computed once for as long as a file is unchanged.

A file counts as unchanged while its inode, size and times are the same. Times have a resolution: a
file that was changed a moment ago could be changed again without its times showing it, so what is
read of such a file is not remembered.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from catenary_services.content.record import CHUNK_BYTES, chunk_count

_SETTLED_NS = 1_500_000_000
"""A file is settled when its last change is older than this. It is coarser than the timestamps of
any file system in use."""
_PIECE_BYTES = 1 << 20
_MOST_THREADS = 8
_MOST_KNOWN = 65_536
"""The most digests remembered: enough for the chunks of a terabyte."""


class FileStamp(NamedTuple):
    """Identity of a file's state: it changes whenever the file does."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(path: Path) -> FileStamp:
        """Returns the stamp of a file, symbolic links followed.

        Raises:
            OSError: The file does not exist or cannot be examined.
        """
        status = path.stat()
        return FileStamp(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    @property
    def is_settled(self) -> bool:
        """True if the last change is so old that a further one would show in the times."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > _SETTLED_NS


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The SHA-256 of a file and of each of its chunks, and the state of the file they belong to."""

    stamp: FileStamp
    sha256: str
    chunks: tuple[str, ...]
    """One digest per `CHUNK_BYTES`; empty for a file that is checked as a whole."""


class DigestCache:
    """Digests by file and chunk, remembered while the file stays as it is. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[FileStamp, int], str] = {}
        """Digests by stamp and chunk index; the index -1 stands for the whole file."""
        self.hashed_bytes = 0
        """Bytes that were hashed so far; digests that were remembered add nothing."""

    def whole(self, path: Path) -> str:
        """Returns the SHA-256 of a file.

        Raises:
            OSError: The file cannot be read.
        """
        return self._digest(path, FileStamp.of(path), -1)

    def chunk(self, path: Path, index: int) -> str:
        """Returns the SHA-256 of one chunk of a file.

        Raises:
            OSError: The file cannot be read.
        """
        return self._digest(path, FileStamp.of(path), index)

    def of_file(self, path: Path) -> FileDigests:
        """Returns the digests of a file and of all its chunks.

        Raises:
            OSError: The file cannot be read, or changes while it is read.
        """
        stamp = FileStamp.of(path)
        count = chunk_count(stamp.size)
        whole = pool().submit(self._digest, path, stamp, -1)
        chunks = [pool().submit(self._digest, path, stamp, index) for index in range(count)]
        digests = tuple(each.result() for each in chunks)
        found = FileDigests(stamp, whole.result(), digests)
        if FileStamp.of(path) != stamp:
            raise OSError(f"{path.name} changes while it is read")
        return found

    def _digest(self, path: Path, stamp: FileStamp, index: int) -> str:
        with self._lock:
            known = self._known.get((stamp, index))
        if known is not None:
            return known
        digest, count = _hash(path, index)
        with self._lock:
            self.hashed_bytes += count
            if stamp.is_settled and FileStamp.of(path) == stamp:
                while len(self._known) >= _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[stamp, index] = digest
        return digest


@cache
def pool() -> ThreadPoolExecutor:
    """Returns the threads that hash files. Hashing releases the interpreter lock."""
    threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1))
    return ThreadPoolExecutor(threads, "catenary-hash")


@cache
def digests() -> DigestCache:
    """Returns the digests that this process remembers."""
    return DigestCache()


def first_failure(work: Iterable[Future[None]]) -> BaseException | None:
    """Returns the exception of the first future that failed, after all of them have ended."""
    failures = [each.exception() for each in work]
    return next((each for each in failures if each is not None), None)


def _hash(path: Path, index: int) -> tuple[str, int]:
    """Returns the digest of a chunk (of the whole file for index -1), and how many bytes it has."""
    digest = hashlib.sha256()
    buffer = bytearray(_PIECE_BYTES)
    view = memoryview(buffer)
    done = 0
    with path.open("rb", buffering=0) as file:
        left = CHUNK_BYTES if index >= 0 else os.fstat(file.fileno()).st_size + 1
        if index > 0:
            file.seek(index * CHUNK_BYTES)
        while left > 0:
            count = file.readinto(view[: min(left, _PIECE_BYTES)])
            if not count:
                break
            digest.update(view[:count])
            done += count
            left -= count
    return digest.hexdigest(), done
