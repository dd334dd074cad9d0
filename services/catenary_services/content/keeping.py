"""Content records on disk: read, made at the first look, kept in step with what is written."""

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
    """The records of versions' folders.

    A folder that cannot be written has its record in memory, as it was made at the first look.
    """

    def __init__(self, known: DigestCache) -> None:
        self._digests = known
        self._read: dict[Path, tuple[FileStamp, ContentRecord]] = {}
        self._unwritten: dict[Path, ContentRecord] = {}

    def known(self, folder: Path, name: str) -> ContentRecord | None:
        """Returns the record of a folder, None if none was made yet.

        Args:
            folder: Of the version.
            name: Of the version, for messages.

        Raises:
            ContentMismatch: the record is damaged.
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
        """Returns the record of a folder; makes it if nobody has. All who make it at once agree.

        Raises:
            ContentMismatch: the record is damaged.
            Unavailable: the files are being written.
        """
        known = self.known(folder, name)
        if known is not None:
            return known
        with locked(folder):  # what one is hashing, others wait for
            known = self.known(folder, name)
            return known if known is not None else self._make(folder, name, precision)

    def make(self, folder: Path, name: str, precision: str) -> ContentRecord:
        """Makes the record of a folder anew, whatever it was.

        Raises:
            Unavailable: the files are being written.
        """
        with locked(folder):
            return self._make(folder, name, precision)

    def update(
        self, folder: Path, name: str, files: Iterable[str], *, derived: bool = False
    ) -> None:
        """Enters files that were written into the record, if there is one.

        Raises:
            ContentMismatch: the record is damaged.
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
    """Keeps other processes from the same work on a folder; yields False where that cannot be."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # some network file systems know no locks
            yield False
            return
        yield True
    finally:
        os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Replaces a file at once; what is there after a crash is one or the other, whole.

    Raises:
        OSError: it cannot be written.
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
    """Has the entries of a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
