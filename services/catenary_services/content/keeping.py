"""Content records on disk: read, made when first asked for, and updated when files are written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from catenary_services.bounded_files import read_bounded
from catenary_services.content.hashing import DigestCache, FileStamp
from catenary_services.content.making import file_record, make_record
from catenary_services.content.record import (
    LARGEST_RECORD_BYTES,
    RECORD_FILE,
    ContentRecord,
    decode,
    encode,
)
from catenary_services.errors import Unavailable

_SHARED_MODE = 0o644


class ContentRecords:
    """The content records of model versions, by folder.

    The record of a folder that cannot be written is kept in memory once it was made.
    """

    def __init__(self, known: DigestCache) -> None:
        self._digests = known
        self._read: dict[Path, tuple[FileStamp, ContentRecord]] = {}
        self._unwritten: dict[Path, ContentRecord] = {}

    def known(self, folder: Path, name: str) -> ContentRecord | None:
        """Returns the content record of a folder, None if none was made yet.

        Args:
            folder: The folder of the version.
            name: Name of the version in error messages.

        Raises:
            ContentMismatch: The record is damaged.
        """
        path = folder / RECORD_FILE
        try:
            stamp = FileStamp.of(path)
            read = self._read.get(folder)
            if read is not None and read[0] == stamp and stamp.is_settled:
                return read[1]
            content = read_bounded(path, LARGEST_RECORD_BYTES + 1, f"{name}/{RECORD_FILE}")
        except FileNotFoundError:
            self._read.pop(folder, None)
            return self._unwritten.get(folder)
        record = decode(content, f"{name}/{RECORD_FILE}")
        self._unwritten.pop(folder, None)
        self._read[folder] = (stamp, record)
        return record

    def known_or_made(self, folder: Path, name: str, precision: str) -> ContentRecord:
        """Returns the content record of a folder, and makes it if there is none.

        Processes that ask at the same time get the same record.

        Raises:
            ContentMismatch: The record is damaged.
            Unavailable: The files are being written.
        """
        known = self.known(folder, name)
        if known is not None:
            return known
        with locked(folder):  # other processes wait here instead of hashing the same files
            known = self.known(folder, name)
            return known if known is not None else self._make(folder, name, precision)

    def make(self, folder: Path, name: str, precision: str) -> ContentRecord:
        """Makes the content record of a folder anew, whether or not there is one.

        Raises:
            Unavailable: The files are being written.
        """
        with locked(folder):
            return self._make(folder, name, precision)

    def update(
        self, folder: Path, name: str, files: Iterable[str], *, derived: bool = False
    ) -> None:
        """Enters files that were written into the folder's record, if it has one.

        Raises:
            ContentMismatch: The record is damaged.
        """
        with locked(folder):
            known = self.known(folder, name)
            if known is None:
                return
            entries = {
                each: file_record(folder / each, self._digests, derived=derived) for each in files
            }
            self._write(folder, msgspec.structs.replace(known, files={**known.files, **entries}))

    def _make(self, folder: Path, name: str, precision: str) -> ContentRecord:
        try:
            record = make_record(folder, precision, self._digests)
        except OSError as error:
            raise Unavailable(f"the files of {name} cannot be recorded yet: {error}") from error
        self._write(folder, record)
        return record

    def _write(self, folder: Path, record: ContentRecord) -> None:
        try:
            write_durably(folder / RECORD_FILE, encode(record))
        except OSError:  # a read-only repository is a normal way to deploy one
            self._unwritten[folder] = record


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Holds the lock of a folder among processes.

    Yields False where the folder cannot be locked.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # some network file systems have no locks
            yield False
            return
        yield True
    finally:
        os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Replaces a file atomically: after a crash its content is either the old or the new one.

    Raises:
        OSError: The file cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_SHARED_MODE)
        Path(temporary).replace(path)
        sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flushes the entries of a folder to disk, so that a renamed file survives a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
