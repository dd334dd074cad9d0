"""Checks the files of a version against its record while somebody reads them.

    with repository.reading(key) as reading:
        reading.begin(file)             # hashed beside what follows
        executor = load(file)
    # here every file was what the record says, from before it was read until after

What parses a file that may come from strangers asks for it to be checked `first`. The rest, weights
in bulk, is hashed on other threads while it is loaded: both read it from the disk once. Leaving the
block waits for the digests, and looks whether the files have stayed as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from catenary_services.bounded_files import read_bounded
from catenary_services.content.hashing import DigestCache, FileStamp, first_failure, pool
from catenary_services.content.record import (
    CHUNK_BYTES,
    ContentRecord,
    FileRecord,
    changed,
    machine,
    mismatch,
    unlisted,
)
from catenary_services.errors import ContentMismatch, ModelNotFound

_AT_ONCE_BYTES = 1 << 20
"""Files up to this are checked at once."""

Ranges = Iterable[tuple[int, int]]
"""Offset and length."""


class VerifiedReading:
    """Files of one version that are being read."""

    def __init__(self, name: str, folder: Path, record: ContentRecord | None, known: DigestCache):
        """Checks files below `folder` by `record`; without one, nothing.

        Args:
            name: Of the version, for messages.
            folder: Its folder.
            record: None: the version has no content of its own here (an emulated device's).
            known: Digests that were computed before.
        """
        self._name = name
        self.folder = folder
        """Of the version."""
        self._record = record
        self._digests = known
        self._stamps: dict[Path, FileStamp] = {}
        self._begun: dict[tuple[Path, int], Future[None]] = {}

    def __enter__(self) -> VerifiedReading:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A file that is not what it should be explains whatever went wrong with loading it.
        if error is None or isinstance(error, Exception):
            self.finish()

    def names(self) -> list[str]:
        """Returns the files in the record."""
        return list(self._record.files) if self._record is not None else []

    def alone(self) -> VerifiedReading:
        """Returns another reading of the same version, which has begun nothing."""
        return VerifiedReading(self._name, self.folder, self._record, self._digests)

    def lists(self, path: Path) -> bool:
        """Returns True if a file is one that is checked: in the record."""
        relative = path.relative_to(self.folder).as_posix()
        return self._record is not None and relative in self._record.files

    def content(self, name: str, most_bytes: int) -> bytes:
        """Returns the bytes of a file, checked.

        Args:
            name: Of the file in the folder.
            most_bytes: More is refused.

        Raises:
            FileNotFoundError: there is no such file, and none was recorded.
            ContentMismatch: it is not what the record says.
            ModelNotFound: it was recorded, and is missing.
            InvalidInput: it is larger.
        """
        path = self.folder / name
        if path.exists() or self.lists(path):
            self.begin(path, first=True)
        return read_bounded(path, most_bytes)

    def begin(self, path: Path, ranges: Ranges | None = None, *, first: bool = False) -> None:
        """Begins to check a file; returns at once unless it is small.

        Args:
            path: The file.
            ranges: What of it will be read; None: all of it.
            first: Returns when it was checked.

        Raises:
            ContentMismatch: it is not in the record, or not what the record says.
            ModelNotFound: it is missing.
            OSError: it cannot be read.
        """
        if self._record is None:
            return
        relative = path.relative_to(self.folder).as_posix()
        recorded = self._record.files.get(relative)
        where = f"{self._name}/{relative}"
        if recorded is None:
            raise unlisted(where)
        try:
            stamp = FileStamp.of(path)
        except FileNotFoundError:
            raise ModelNotFound(f"{where} is missing on {machine()}") from None
        if self._stamps.setdefault(path, stamp) != stamp:
            raise changed(where)
        if stamp.size != recorded.size:
            raise mismatch(where, str(recorded.size), str(stamp.size), what="size")
        begun = [
            self._begun[path, index]
            if (path, index) in self._begun
            else self._begin(path, recorded, index, where)
            for index in _chunks(recorded, ranges)
        ]
        if first or recorded.size <= _AT_ONCE_BYTES:
            failure = first_failure(begun)
            if failure is not None:
                raise failure

    def begin_own(self) -> None:
        """Begins to check every file that was not made here from the others.

        Raises:
            ContentMismatch: one is not what the record says.
            ModelNotFound: one is missing.
            OSError: one cannot be read.
        """
        files = self._record.files if self._record is not None else {}
        for name, recorded in files.items():
            if not recorded.derived:
                self.begin(self.folder / name)

    def finish(self) -> None:
        """Waits until everything begun was checked.

        Raises:
            ContentMismatch: a file is not what the record says, or changed meanwhile.
            OSError: one cannot be read.
        """
        failure = first_failure(self._begun.values())
        if failure is not None:
            raise failure
        for path, stamp in self._stamps.items():
            if FileStamp.of(path) != stamp:
                raise changed(f"{self._name}/{path.relative_to(self.folder).as_posix()}")

    def _begin(self, path: Path, recorded: FileRecord, index: int, where: str) -> Future[None]:
        def check() -> None:
            if index < 0:
                found, expected, what = self._digests.whole(path), recorded.sha256, "sha256"
            else:
                found, expected = self._digests.chunk(path, index), recorded.chunks[index]
                what = f"sha256 of its bytes from {index * CHUNK_BYTES} on"
            if found != expected:
                raise mismatch(where, expected, found, what)

        work = self._begun[path, index] = pool().submit(check)
        return work


def check_all(reading: VerifiedReading) -> list[str]:
    """Returns, in words, what is wrong with the files that were recorded; checks all of them."""
    problems = []
    for name in reading.names():
        single = reading.alone()
        try:
            single.begin(reading.folder / name)
            single.finish()
        except (ContentMismatch, ModelNotFound) as error:
            problems.append(error.message)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error}")
    return problems


def _chunks(recorded: FileRecord, ranges: Ranges | None) -> list[int]:
    """Returns the chunks that hold some ranges; -1 stands for a file that has none."""
    if not recorded.chunks:
        return [-1]
    if ranges is None:
        return list(range(len(recorded.chunks)))
    wanted = {
        index
        for offset, length in ranges
        if length > 0
        for index in range(offset // CHUNK_BYTES, -(-(offset + length) // CHUNK_BYTES))
    }
    # Beyond the end there is nothing to check: whoever reads there finds that out.
    return sorted(index for index in wanted if index < len(recorded.chunks))
