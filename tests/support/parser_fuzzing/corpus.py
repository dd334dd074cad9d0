"""Inputs that are kept: one archive for each parser, and each finding as a file of its own."""

from __future__ import annotations

import hashlib
import importlib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from parser_fuzzing.target import FuzzTarget

ROOMS = ("wire", "doors", "bodies", "model_files", "stored")
"""The modules of targets; a target is named after its own, as in "wire/frames"."""
FOLDER = Path(__file__).resolve().parents[2] / "data" / "parsers"
MOST_KEPT_BYTES = 24 * 1024
"""The most bytes of one archive."""
_MADE = (2020, 1, 1, 0, 0, 0)


def targets(room: str) -> tuple[FuzzTarget, ...]:
    """Returns the targets of a module, which is imported."""
    found: tuple[FuzzTarget, ...] = importlib.import_module(f"parser_fuzzing.{room}").TARGETS
    return found


def target_of(name: str) -> FuzzTarget:
    """Returns the target of a name."""
    return next(each for each in targets(name.partition("/")[0]) if each.name == name)


def findings_folder(name: str) -> Path:
    """Returns the folder with what once broke a parser."""
    return FOLDER / name


def kept(name: str) -> Iterator[tuple[str, bytes]]:
    """Yields the kept inputs of a target with their names: first those that once broke it."""
    folder = findings_folder(name)
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        yield file.name, file.read_bytes()
    archive = _archive(name)
    if archive.exists():
        with zipfile.ZipFile(archive) as opened:
            for member in opened.namelist():
                yield member, opened.read(member)


def keep(name: str, inputs: Iterable[bytes]) -> int:
    """Replaces the archive of a target by the shortest of the inputs; returns how many these are.

    Equal inputs make equal bytes, so that a run that found nothing new changes nothing.
    """
    archive, count = _archive(name), 0
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as opened:
        for data in sorted(set(inputs), key=lambda each: (len(each), each)):
            member = zipfile.ZipInfo(digest(data), _MADE)
            member.compress_type = zipfile.ZIP_DEFLATED
            opened.writestr(member, data)
            count += 1
            if opened.fp is not None and opened.fp.tell() > MOST_KEPT_BYTES:
                break
    return count


def digest(data: bytes) -> str:
    """Returns the name under which an input is kept."""
    return hashlib.sha256(data).hexdigest()[:16]


def _archive(name: str) -> Path:
    return FOLDER / f"{name}.zip"
