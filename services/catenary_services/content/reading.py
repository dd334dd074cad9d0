"""Checks of a version's files against its content record while the files are being loaded.

    with repository.reading(key) as reading:
        reading.begin(file)             # hashed beside what follows
        executor = load(file)
    # here every file was what the record says, from before it was read until after

What parses a file that may come from strangers asks for it to be checked `first`. The rest, weights
in bulk, is hashed on other threads while it is loaded: both read it from the disk once. Leaving the
block waits for the digests, and looks whether the files have stayed as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Protocol

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
"""Files up to this size are checked before `begin` returns."""

Ranges = Iterable[tuple[int, int]]
"""Pairs of an offset and a length, in bytes."""


class FileSupplier(Protocol):
    """Brings in files of a version that may not be here yet.

    Files have their size from the beginning, and chunks without content until they are brought. The
    chunk -1 stands for a file without chunks.
    """

    def expect(self, name: str, recorded: FileRecord, chunks: Iterable[int]) -> None:
        """Begins to bring chunks of a file that will be read soon."""
        ...

    def bring(self, name: str, recorded: FileRecord, chunks: Iterable[int]) -> None:
        """Returns when chunks of a file are here.

        Raises:
            Unavailable: They come from nowhere.
            PlanInfeasible: There is no room for them.
        """
        ...

    def replace(self, name: str, recorded: FileRecord, chunk: int) -> bool:
        """Brings a chunk anew that was found to be wrong; returns False if it cannot."""
        ...

    def state(self, name: str, recorded: FileRecord) -> tuple[int, ...] | None:
        """Returns a state of the file that changes when anybody else writes to it.

        It is None for a file that is not the supplier's.
        """
        ...


class VerifiedReading:
    """A check of one version's files, open for as long as somebody loads them."""

    def __init__(
        self,
        name: str,
        folder: Path,
        record: ContentRecord | None,
        known: DigestCache,
        supplier: FileSupplier | None = None,
    ) -> None:
        """Checks files below `folder` against `record`.

        Args:
            name: Name of the version in error messages.
            folder: The folder of the version.
            record: The content record; None where the version has no content of its own (on an
                emulated device): then nothing is checked.
            known: Digests that were computed before.
            supplier: What brings in the files before they are read; None if all are here.
        """
        self._name = name
        self.folder = folder
        """The folder of the version."""
        self._record = record
        self._digests = known
        self._supplier = supplier
        self._states: dict[Path, tuple[int, ...]] = {}
        self._begun: dict[tuple[Path, int], Future[None]] = {}

    def __enter__(self) -> VerifiedReading:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A file with the wrong content explains any error that loading it has raised.
        if error is None or isinstance(error, Exception):
            self.finish()

    @property
    def is_fetched(self) -> bool:
        """True if files may have to be brought in, so that it pays to name what is read of them."""
        return self._supplier is not None

    def names(self) -> list[str]:
        """Returns the paths of all recorded files, relative to the folder."""
        return list(self._record.files) if self._record is not None else []

    def alone(self) -> VerifiedReading:
        """Returns a new reading of the same version that has checked nothing yet."""
        return VerifiedReading(self._name, self.folder, self._record, self._digests, self._supplier)

    def lists(self, path: Path) -> bool:
        """Returns True if a file is in the content record, and is therefore checked."""
        relative = path.relative_to(self.folder).as_posix()
        return self._record is not None and relative in self._record.files

    def content(self, name: str, most_bytes: int) -> bytes:
        """Returns the bytes of a file after they were checked.

        Args:
            name: Path of the file in the folder.
            most_bytes: A larger file is refused.

        Raises:
            FileNotFoundError: The file does not exist and was not recorded.
            ContentMismatch: The file is not what the record says.
            ModelNotFound: The file was recorded and is missing.
            InvalidInput: The file is larger.
        """
        path = self.folder / name
        if path.exists() or self.lists(path):
            self.begin(path, first=True)
        return read_bounded(path, most_bytes)

    def expect(self, path: Path, ranges: Ranges | None = None) -> None:
        """Notes that ranges of a file will be read soon, so that they are brought in meanwhile."""
        if self._record is None or self._supplier is None:
            return
        relative = path.relative_to(self.folder).as_posix()
        recorded = self._record.files.get(relative)
        if recorded is not None:
            self._supplier.expect(relative, recorded, _chunks(recorded, ranges))

    def begin(self, path: Path, ranges: Ranges | None = None, *, first: bool = False) -> None:
        """Begins to check a file, and returns at once unless the file is small.

        What a supplier has yet to bring in is waited for.

        Args:
            path: The file.
            ranges: The parts of the file that will be read; None for all of it.
            first: Whether to return only when the check is complete.

        Raises:
            ContentMismatch: The file is not in the record, or not what the record says.
            ModelNotFound: The file is missing.
            Unavailable: It cannot be brought in.
            PlanInfeasible: There is no room for it.
            OSError: The file cannot be read.
        """
        if self._record is None:
            return
        relative = path.relative_to(self.folder).as_posix()
        recorded = self._record.files.get(relative)
        where = f"{self._name}/{relative}"
        if recorded is None:
            raise unlisted(where)
        chunks = _chunks(recorded, ranges)
        try:
            if self._supplier is not None:
                self._supplier.bring(relative, recorded, chunks)
            state, size = self._state(path, relative, recorded), path.stat().st_size
        except FileNotFoundError:
            raise ModelNotFound(f"{where} is missing on {machine()}") from None
        if self._states.setdefault(path, state) != state:
            raise changed(where)
        if size != recorded.size:
            raise mismatch(where, str(recorded.size), str(size), what="size")
        begun = [
            self._begun[path, index]
            if (path, index) in self._begun
            else self._begin(path, recorded, index, where)
            for index in chunks
        ]
        if first or recorded.size <= _AT_ONCE_BYTES:
            failure = first_failure(begun)
            if failure is not None:
                raise failure

    def begin_own(self) -> None:
        """Begins to check every file that was not derived from others on this machine.

        Raises:
            ContentMismatch: A file is not what the record says.
            ModelNotFound: A file is missing.
            OSError: A file cannot be read.
        """
        files = self._record.files if self._record is not None else {}
        own = [self.folder / name for name, recorded in files.items() if not recorded.derived]
        for path in own:
            self.expect(path)
        for path in own:
            self.begin(path)

    def finish(self) -> None:
        """Waits for all checks that were begun.

        Raises:
            ContentMismatch: A file is not what the record says, or changed in the meantime.
            OSError: A file cannot be read.
        """
        failure = first_failure(self._begun.values())
        if failure is not None:
            raise failure
        files = self._record.files if self._record is not None else {}
        for path, state in self._states.items():
            relative = path.relative_to(self.folder).as_posix()
            if self._state(path, relative, files[relative]) != state:
                raise changed(f"{self._name}/{relative}")

    def _state(self, path: Path, relative: str, recorded: FileRecord) -> tuple[int, ...]:
        known = self._supplier.state(relative, recorded) if self._supplier is not None else None
        return known if known is not None else FileStamp.of(path)

    def _begin(self, path: Path, recorded: FileRecord, index: int, where: str) -> Future[None]:
        def compare() -> ContentMismatch | None:
            if index < 0:
                found, expected, what = self._digests.whole(path), recorded.sha256, "sha256"
            else:
                found, expected = self._digests.chunk(path, index), recorded.chunks[index]
                what = f"sha256 of its bytes from {index * CHUNK_BYTES} on"
            return mismatch(where, expected, found, what) if found != expected else None

        def check() -> None:
            wrong = compare()
            if wrong is not None and self._supplier is not None:
                relative = path.relative_to(self.folder).as_posix()
                wrong = compare() if self._supplier.replace(relative, recorded, index) else wrong
            if wrong is not None:
                raise wrong

        work = self._begun[path, index] = pool().submit(check)
        return work


def check_all(
    reading: VerifiedReading, ranges_of: Callable[[str], Ranges | None] | None = None
) -> list[str]:
    """Checks all recorded files, and returns a sentence for each that is wrong.

    Args:
        reading: The reading of a version.
        ranges_of: Returns the ranges of a file, given its path, that are checked; None for all of
            every file.
    """
    problems = []
    for name in reading.names():
        single = reading.alone()
        ranges = ranges_of(name) if ranges_of is not None else None
        if ranges is not None and not list(ranges):
            continue
        try:
            single.begin(reading.folder / name, ranges)
            single.finish()
        except (ContentMismatch, ModelNotFound) as error:
            problems.append(error.message)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error}")
    return problems


def _chunks(recorded: FileRecord, ranges: Ranges | None) -> list[int]:
    """Returns the indices of the chunks that overlap some ranges.

    The index -1 stands for a file without chunks.
    """
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
    # Nothing is recorded beyond the end of the file, and whoever reads there fails by itself.
    return sorted(index for index in wanted if index < len(recorded.chunks))
