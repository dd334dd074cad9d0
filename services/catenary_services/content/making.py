"""Making the content record of a version's folder from the files in it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from catenary_services.bounded_files import LARGEST_JSON_BYTES, read_bounded, read_yaml_text
from catenary_services.content.hashing import DigestCache
from catenary_services.content.record import (
    FORMAT,
    RECORD_FILE,
    SOURCE_FILE,
    ContentRecord,
    FileRecord,
)
from catenary_services.errors import InvalidInput

_MEASURED = frozenset({"profile.json", "profile.json.partial"})
"""Measuring writes these files later, and repeatedly; they are no part of the content."""
_WORDS = (".md",)
_WORD_NAMES = ("LICENSE", "NOTICE", "README")
_MOST_FILES = 10_000
GRAPH_PREFIX = "onnx-"
"""The folder of a graph in one precision has a name that begins with this."""

_SERVING = {"platform": "", "file": "", "precision": "fp32", "float16_boundaries": True}
"""The keys of model.yaml that computing depends on, with their defaults."""
_OPTIONAL = ("dimensions", "text_tokens", "engine_file", "engine_arguments", "adapters")
"""Further ones, which earlier records do not have: they count where they are."""


def make_record(folder: Path, precision: str, known: DigestCache) -> ContentRecord:
    """Returns the content record of a version's folder; reads every file in it.

    Args:
        folder: The folder of the version.
        precision: The precision the version is served in on CPUs; graphs of others count as
            derived.
        known: Digests that were computed before.

    Raises:
        InvalidInput: There are too many files.
        OSError: A file cannot be read, or changes while it is read.
    """
    files = {}
    for path in _files(folder):
        relative = path.relative_to(folder).as_posix()
        top = relative.split("/")[0]
        is_derived = top.startswith(GRAPH_PREFIX) and top != f"{GRAPH_PREFIX}{precision}"
        is_derived = is_derived or relative == SOURCE_FILE
        files[relative] = file_record(path, known, derived=is_derived)
        if len(files) > _MOST_FILES:
            raise InvalidInput(folder.name, f"has more than {_MOST_FILES} files")
    return ContentRecord(FORMAT, files)


def file_record(path: Path, known: DigestCache, *, derived: bool = False) -> FileRecord:
    """Returns the entry of one file in a content record.

    Raises:
        OSError: The file cannot be read, or changes while it is read.
    """
    found = known.of_file(path)
    return FileRecord(found.stamp.size, found.sha256, meaning_of(path), found.chunks, derived)


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files that a process might load, in order. Hidden files are caches and scratch."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place) / name
            if is_recorded_name(PurePosixPath(path.relative_to(folder))) and path.is_file():
                yield path


def is_recorded_name(path: PurePosixPath) -> bool:
    """Returns True if a file of this path in a version's folder belongs to its content."""
    if any(part.startswith(".") for part in path.parts):
        return False
    if path.name.startswith(_WORD_NAMES) or path.name.endswith(_WORDS):
        return False
    return len(path.parts) > 1 or (path.name != RECORD_FILE and path.name not in _MEASURED)


def meaning_of(path: Path) -> str | None:
    """Returns the digest of what a file says about the content; None if every byte counts."""
    try:
        if path.name == "model.yaml":
            document: Any = yaml.safe_load(read_yaml_text(path))
            said: Any = {key: document.get(key, usual) for key, usual in _SERVING.items()}
            said.update({key: document[key] for key in _OPTIONAL if key in document})
        elif path.name == "blocks.json":
            said = json.loads(read_bounded(path, LARGEST_JSON_BYTES))
            del said["compute_ns"]
        elif path.name == "decoder.json":
            said = json.loads(read_bounded(path, LARGEST_JSON_BYTES))
            # Sizes depend on the stored precision, and forms on which were made so far.
            for name in ("block_bytes", "head_bytes", "forms", "forms_version"):
                said.pop(name, None)
        else:
            return None
        text = json.dumps(said, sort_keys=True)
    except (
        InvalidInput,
        yaml.YAMLError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return None  # counts byte for byte; whoever loads it reports the error
    return hashlib.sha256(text.encode()).hexdigest()
