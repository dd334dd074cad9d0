"""A record on disk of which chunks of a fetched file are here, shared by processes.

Beside the file, which has its full size from the beginning and holes where nothing has come yet,
lies its map: one byte per chunk, which becomes 1 when the chunk is on the disk for good. A crash
therefore loses the chunk that was being written, and nothing else.

The map also has the state in which the file was left by its last writer, and the number of a
*chain*: it stays while every change of the file is one that was made here, so that a reader who
finds another one knows that somebody else has written to the file. Locks on bytes of the map, which
end with their process, keep two processes from fetching one chunk, and from writing at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

from catenary_services.content.hashing import FileStamp
from catenary_services.content.record import CHUNK_BYTES, FileRecord

_HEADER = struct.Struct("<8sQQQQqq")
_MAGIC = b"CTNMAP01"
_BODY = 64
_LOCK = struct.Struct("hhqqi")
_WRITER = 1 << 40
"""The byte whose lock a writer holds; it lies behind all chunks."""
_MODE = 0o644
_HERE = b"\x01"

FileState = tuple[int, int, int]
"""Inode, size and chain of a file; it changes whenever somebody else writes to the file."""


def chunks_of(recorded: FileRecord) -> int:
    """Returns the number of chunks in which a file is fetched, at least 1."""
    return max(1, len(recorded.chunks))


def chunk_span(recorded: FileRecord, chunk: int) -> tuple[int, int]:
    """Returns the offset and the length of a chunk, in bytes."""
    if not recorded.chunks:
        return 0, recorded.size
    offset = chunk * CHUNK_BYTES
    return offset, min(CHUNK_BYTES, recorded.size - offset)


def chunk_digest(recorded: FileRecord, chunk: int) -> str:
    """Returns the recorded SHA-256 of a chunk."""
    return recorded.chunks[chunk] if recorded.chunks else recorded.sha256


class ChunkMap:
    """The map of one file."""

    def __init__(self, map_file: Path, file: Path, recorded: FileRecord) -> None:
        self._map = map_file
        self._file = file
        self._recorded = recorded

    def create(self) -> None:
        """Makes the file in its full size, without content, unless it is there.

        Raises:
            OSError: It cannot be made.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT, _MODE)
        try:
            if os.fstat(handle).st_size != self._recorded.size:
                os.ftruncate(handle, self._recorded.size)
        finally:
            os.close(handle)

    def is_here(self, chunk: int) -> bool:
        """Returns True if a chunk has been fetched."""
        try:
            handle = os.open(self._map, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return os.pread(handle, 1, _BODY + chunk) == _HERE
        finally:
            os.close(handle)

    def here(self) -> list[int]:
        """Returns the chunks that have been fetched."""
        try:
            said = self._map.read_bytes()[_BODY:]
        except FileNotFoundError:
            return []
        return [each for each in range(chunks_of(self._recorded)) if said[each : each + 1] == _HERE]

    @contextlib.contextmanager
    def claimed(self, chunk: int) -> Iterator[bool]:
        """Keeps other processes from fetching a chunk; yields False if one is fetching it."""
        with self._opened() as handle:
            yield _try_lock(handle, _BODY + chunk)

    def write(self, chunk: int, content: bytes | bytearray | memoryview) -> None:
        """Writes a chunk, which was verified, to the disk.

        Raises:
            OSError: It cannot be written: the disk is full, say.
        """
        offset, length = chunk_span(self._recorded, chunk)
        if len(content) != length:
            raise ValueError(f"{len(content)} bytes for a chunk of {length}")
        with self._written() as handle:
            target = os.open(self._file, os.O_WRONLY)
            try:
                view = memoryview(content)
                while view:
                    count = os.pwrite(target, view, offset)
                    view, offset = view[count:], offset + count
                os.fdatasync(target)
            finally:
                os.close(target)
            os.pwrite(handle, _HERE, _BODY + chunk)

    def forget(self, chunk: int) -> None:
        """Notes that a chunk is not here: its content was found to be wrong."""
        with self._opened() as handle, _lock(handle, _WRITER):
            os.pwrite(handle, b"\x00", _BODY + chunk)

    def state(self) -> FileState:
        """Returns the state of the file.

        Raises:
            OSError: The file or its map cannot be read.
        """
        with self._opened() as handle, _lock(handle, _WRITER):
            chain = self._present_chain(handle)
            stamp = FileStamp.of(self._file)
            return stamp.inode, stamp.size, chain

    @contextlib.contextmanager
    def _written(self) -> Iterator[int]:
        """Holds the writer's lock, and enters the state that the writer has left."""
        with self._opened() as handle, _lock(handle, _WRITER):
            chain = self._present_chain(handle)
            try:
                yield handle
            finally:
                self._enter(handle, chain)

    def _present_chain(self, handle: int) -> int:
        """Returns the chain; a new one if somebody else has changed the file since."""
        read = os.pread(handle, _HEADER.size, 0)
        stamp = FileStamp.of(self._file)
        if len(read) == _HEADER.size:
            magic, chain, *left = _HEADER.unpack(read)
            if magic == _MAGIC and tuple(left) == stamp:
                return int(chain)
        chain = secrets.randbits(63)
        self._enter(handle, chain)
        return chain

    def _enter(self, handle: int, chain: int) -> None:
        stamp = FileStamp.of(self._file)
        os.pwrite(handle, _HEADER.pack(_MAGIC, chain, *stamp), 0)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        handle = os.open(self._map, os.O_RDWR | os.O_CREAT, _MODE)
        try:
            yield handle
        finally:
            os.close(handle)


def _try_lock(handle: int, at: int) -> bool:
    """Locks a byte for the open file; returns False if another one has it locked."""
    try:
        order = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, order)
    except OSError as error:
        # Where a file system has no locks, two processes may fetch one chunk, which is harmless.
        return error.errno not in {errno.EAGAIN, errno.EACCES}
    return True


@contextlib.contextmanager
def _lock(handle: int, at: int) -> Iterator[None]:
    """Holds the lock of a byte, for which it waits."""
    order = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
    with contextlib.suppress(OSError):
        fcntl.fcntl(handle, fcntl.F_OFD_SETLKW, order)
    try:
        yield
    finally:
        order = _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0)
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, order)
