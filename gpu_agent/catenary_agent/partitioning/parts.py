"""Extracted parts on disk, so that an agent reads only the weights it serves.

A part is kept in a folder named by the SHA-256 of everything that determines it: the model's files,
the cut, the library and this program's way of cutting. Beside its files is `part.json` with all
these facts and the digests of the files. A part is used only if its files match `part.json`; one
that is torn, truncated or altered is deleted and built again.

The builder of a part locks its name, so that two agents do not build it at the same time. It is
built in a temporary folder, flushed to the disk and renamed. Where the cache cannot be written, the
part is in a temporary folder for as long as it takes to load it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from catenary_services.bounded_files import read_bounded
from catenary_services.content.hashing import digests
from catenary_services.content.keeping import locked, sync_folder
from catenary_services.content.making import file_record
from catenary_services.content.reading import VerifiedReading
from catenary_services.content.record import FORMAT, ContentRecord, FileRecord, machine
from catenary_services.domain.tensors import TensorSpec
from catenary_services.errors import CatenaryError, ContentMismatch
from catenary_services.log import get_logger
from catenary_services.scratch import ScratchFolder

CACHE_FOLDER = ".parts"
PART_FILE = "part.json"
_FORMAT = 3
"""Version of the way parts are extracted; parts of another version are not used."""
_LARGEST_BYTES = 1 << 20

_log = get_logger("catenary_agent.parts")


@dataclass(frozen=True, slots=True)
class PartName:
    """The facts that determine a part."""

    source: str
    """The digest of the model version's content; that of the model file where it has no record."""
    cut: str
    """The SHA-256 of the tensors at its two ends."""
    variant: str
    """The library that the part is for, with its version where that matters, e.g. "onnx"."""
    cutter: int = _FORMAT

    @staticmethod
    def of(
        source: str, ends: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]], variant: str
    ) -> PartName:
        """Returns the name of the part between two sets of tensors of a model."""
        described = [[[t.name, t.datatype, *t.shape] for t in end] for end in ends]
        return PartName(source, hashlib.sha256(json.dumps(described).encode()).hexdigest(), variant)

    @property
    def folder(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `part.json`."""

    made_of: dict[str, str | int]
    files: dict[str, FileRecord]


@contextlib.contextmanager
def part_folder(cache: Path, name: PartName, build: Callable[[Path], None]) -> Iterator[Path]:
    """Yields the folder that `build` filled, now or earlier; valid inside the `with` block.

    Raises:
        ContentMismatch: Its files were changed inside the block.
    """
    final = cache / name.folder
    reading = _cached(cache, name, build)
    if reading is not None:
        yield final
        reading.finish()
        return
    with ScratchFolder(".catenary-part-") as made:
        build(made)
        yield made


def _cached(cache: Path, name: PartName, build: Callable[[Path], None]) -> VerifiedReading | None:
    """Returns a part of the cache, which is built if it is missing; None without a cache.

    Raises:
        ContentMismatch: The disk returns other bytes than were written.
    """
    final = cache / name.folder
    reading = _checked(final, name)
    if reading is not None:
        return reading
    lock = cache / f".{name.folder}.lock"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.mkdir(exist_ok=True)  # a folder, because it can be locked where nothing can be written
        scratch = Path(tempfile.mkdtemp(prefix=f".{name.folder}.", dir=cache))
    except OSError as error:  # a read-only repository is a normal way to deploy one
        _log.info("parts_not_cached", folder=str(cache), error=str(error))
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        is_alone = stack.enter_context(locked(lock))
        reading = _checked(final, name, quiet=True)  # another agent may have built it meanwhile
        if reading is not None:
            return reading
        if is_alone:
            _remove_leftovers(cache, name, scratch)
        _discard(final, scratch)
        made = scratch / "part"
        made.mkdir()
        build(made)
        _seal(made, name)
        try:
            made.rename(final)
        except OSError:
            # If another builder finished first the folder exists; anything else is a real failure.
            if not final.is_dir():
                raise
        sync_folder(cache)
    reading = _checked(final, name)
    if reading is None:  # a disk that returns other bytes than were written
        raise ContentMismatch(f"{final} on {machine()} is not what was just written there")
    return reading


def _checked(final: Path, name: PartName, *, quiet: bool = False) -> VerifiedReading | None:
    """Returns the part in a folder; None if it is missing or, which is logged, damaged."""
    if not os.path.lexists(final):
        return None
    try:
        return _check(final, name)
    except (CatenaryError, OSError, msgspec.DecodeError) as error:
        if not quiet:
            _log.warning(
                "part_rebuilt",
                part=str(final),
                machine=machine(),
                reason=str(error),
                note="the cached part is thrown away and made anew from the model's file",
            )
        return None


def _check(final: Path, name: PartName) -> VerifiedReading:
    """Returns the reading of a part whose files all match `part.json`.

    Raises:
        ContentMismatch: The part is of something else, or a file was added, removed or changed.
    """
    stored = msgspec.json.decode(read_bounded(final / PART_FILE, _LARGEST_BYTES), type=_Stored)
    if stored.made_of != asdict(name):
        raise ContentMismatch("it was made of something else")
    there = {path.name for path in final.iterdir()} - {PART_FILE}
    if there != stored.files.keys() or not there:
        said = ", ".join(sorted(there)) or "nothing"
        raise ContentMismatch(f"it has {said} instead of {', '.join(sorted(stored.files))}")
    reading = VerifiedReading(final.name, final, ContentRecord(FORMAT, stored.files), digests())
    for file in stored.files:
        if not (final / file).is_file():
            raise ContentMismatch(f"{file} is not a file")
        reading.begin(final / file)
    reading.finish()  # before anything parses a file
    return reading


def _seal(made: Path, name: PartName) -> None:
    """Writes `part.json` with the digests of a part, and flushes all of it to the disk."""
    files = {}
    for path in sorted(made.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = file_record(path, digests())
    made_of: dict[str, Any] = asdict(name)
    with (made / PART_FILE).open("wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(_Stored(made_of, files))))
        out.flush()
        os.fsync(out.fileno())
    made.chmod(0o755)
    sync_folder(made)


def _discard(final: Path, scratch: Path) -> None:
    """Moves a damaged part out of the way; it is deleted with the scratch folder."""
    with contextlib.suppress(FileNotFoundError):
        final.rename(scratch / "discarded")


def _remove_leftovers(cache: Path, name: PartName, mine: Path) -> None:
    """Removes what crashed builders of this part have left; nobody else is building it now."""
    for path in cache.glob(f".{name.folder}.*"):
        if path != mine and path.suffix != ".lock" and not _is_waiting(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_waiting(path: Path) -> bool:
    """Returns True for an empty scratch folder, whose maker may be waiting for the held lock."""
    try:
        return not any(path.iterdir())
    except OSError:
        return True
