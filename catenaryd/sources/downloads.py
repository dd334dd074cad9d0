"""Downloaded files: brought in aside, resumed where they stopped, and verified.

    <repository>/.downloads/<digest of source and revision>/
        .lock           held by the one process that brings them in
        files/          whole files, verified
        partial/        what came so far of the others

Nothing below `.downloads` is a version of the repository. A folder is dropped once the model is
imported; those that nobody came back for go after a week.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from catenary_services.content.hashing import digests
from catenary_services.content.record import SHOWN_DIGITS
from catenary_services.errors import ContentMismatch, Unavailable
from catenary_services.models.source_record import SourceFileRecord
from catenary_services.models.staging import STAGING_PREFIX, link_or_copy
from catenaryd.sources.listing import ListedFile, SourceListing

DOWNLOADS_FOLDER = ".downloads"
KEPT_S = 7 * 86_400.0
_PIECE_BYTES = 1 << 20
_PUBLIC_MODE = 0o644
_READABLE = 0o444

Progress = Callable[[ListedFile, int], None]
"""Called with a file and a number of bytes of it that came."""


class Download:
    """The files of one revision of a source, as far as they came. One process at a time."""

    def __init__(self, root: Path, listing: SourceListing) -> None:
        """Names the folder of a listing below the repository at `root`."""
        identity = f"{listing.source.text}\0{listing.revision}"
        self.folder = root / DOWNLOADS_FOLDER / hashlib.sha256(identity.encode()).hexdigest()[:24]
        self.files = self.folder / "files"
        self._partial = self.folder / "partial"
        self._listing = listing

    @contextmanager
    def held(self) -> Iterator[Download]:
        """Keeps other processes from bringing in the same files.

        Raises:
            Unavailable: Another process does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Unavailable(
                    f"{self._listing.source.text} is being fetched by another process of this"
                    " machine"
                ) from None
            except OSError:
                pass  # some network file systems have no locks
            os.utime(self.folder)
            yield self
        finally:
            os.close(lock)

    def missing_bytes(self, files: tuple[ListedFile, ...]) -> int:
        """Returns how many bytes of files are not here yet."""
        return sum(file.size - self._here(file) for file in files)

    def bring(self, file: ListedFile, progress: Progress) -> SourceFileRecord:
        """Returns the record of a file, which is whole, verified and below `files` afterwards.

        Raises:
            CatenaryError: It did not come, or is not what the source says it is.
        """
        whole = self.files / file.path
        if not (whole.is_file() and whole.stat().st_size == file.size):
            transport = self._listing.transport
            assert transport is not None
            partial = self._place_of(file)
            cached = transport.local(file)
            if cached is not None and cached.stat().st_size == file.size:
                partial.unlink(missing_ok=True)
                link_or_copy(cached, partial)
                progress(file, file.size)
            else:
                self._append(file, partial, progress)
            self._verify(file, partial)
            whole.parent.mkdir(parents=True, exist_ok=True)
            if partial.stat().st_mode & _READABLE != _READABLE:
                partial.chmod(_PUBLIC_MODE)
            partial.replace(whole)
        return SourceFileRecord(size=file.size, sha256=digests().whole(whole))

    def try_rate(self, file: ListedFile, seconds: float, most_bytes: int) -> float:
        """Returns the bytes per second at which the next bytes of a file come; 0 if none are left.

        They are kept.
        """
        if self._here(file) >= file.size or self._listing.transport is None:
            return 0.0
        if self._listing.transport.local(file) is not None:
            return 0.0
        started, came = time.monotonic(), 0

        def told(_: ListedFile, count: int) -> None:
            nonlocal came
            came += count
            if came >= most_bytes or time.monotonic() - started >= seconds:
                raise _EnoughError

        with suppress(_EnoughError):
            self._append(file, self._place_of(file), told)
        return came / max(1e-6, time.monotonic() - started)

    def drop(self) -> None:
        """Removes the files and what came of others, once the model is imported."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _append(self, file: ListedFile, partial: Path, progress: Progress) -> None:
        transport = self._listing.transport
        assert transport is not None
        partial.touch()
        here = partial.stat().st_size
        if here > file.size:
            partial.write_bytes(b"")
            here = 0
        with partial.open("r+b") as into:
            into.seek(here)
            transport.append(file, into, lambda count: progress(file, count))
            into.flush()
            os.fsync(into.fileno())

    def _place_of(self, file: ListedFile) -> Path:
        place = self._partial / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _here(self, file: ListedFile) -> int:
        whole, partial = self.files / file.path, self._partial / file.path
        if whole.is_file():
            return file.size
        return min(file.size, partial.stat().st_size) if partial.is_file() else 0

    def _verify(self, file: ListedFile, partial: Path) -> None:
        """Checks a file that came; what is wrong is thrown away.

        Raises:
            ContentMismatch: It is not what the source says.
        """
        size = partial.stat().st_size
        pairs = [("size", str(file.size), str(size))]
        if file.sha256 and size == file.size:
            pairs.append(("sha256", file.sha256, digests().whole(partial)))
        elif file.git_sha1 and size == file.size:
            pairs.append(("git's sha1", file.git_sha1, _git_sha1(partial, size)))
        for what, expected, found in pairs:
            if expected != found:
                partial.unlink()
                raise ContentMismatch(
                    f"{self._listing.source.text}: {file.path} is not what its source says: {what}"
                    f" {found[:SHOWN_DIGITS]} instead of {expected[:SHOWN_DIGITS]}; it was thrown"
                    " away"
                )


class _EnoughError(Exception):
    """Ends a transfer that was begun to see how fast it is."""


def sweep(root: Path, now_s: float) -> None:
    """Removes downloads, and halves of imports that were killed, which nobody came back for."""
    left = [*(root / DOWNLOADS_FOLDER).glob("*"), *root.glob(f"{STAGING_PREFIX}*")]
    for folder in left:
        try:
            is_old = now_s - folder.stat().st_mtime > KEPT_S
        except OSError:
            continue  # removed this moment
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)


def _git_sha1(path: Path, size: int) -> str:
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
