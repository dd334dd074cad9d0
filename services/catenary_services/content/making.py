"""Making the content record of a folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from catenary_services.bounded_files import LARGEST_JSON_BYTES, read_bounded, read_yaml_text
from catenary_services.content.hashing import DigestCache
from catenary_services.content.record import FORMAT, RECORD_FILE, ContentRecord, FileRecord
from catenary_services.errors import InvalidInput

_MEASURED = frozenset({"profile.json", "profile.json.partial"})
"""Written later, and again, by measuring."""
_WORDS = (".md",)
_WORD_NAMES = ("LICENSE", "NOTICE", "README")
_MOST_FILES = 10_000
GRAPH_PREFIX = "onnx-"
"""Of the folder of a graph in one precision."""

_SERVING = {"platform": "", "file": "", "precision": "fp32", "float16_boundaries": True}
"""Of model.yaml, with defaults: what computing depends on."""


def make_record(folder: Path, precision: str, known: DigestCache) -> ContentRecord:
    """Returns the record of the files in a version's folder; reads all of them.

    Args:
        folder: Of the version.
        precision: In which the version is served on CPUs; graphs of others are derived.
        known: Digests that were computed before.

    Raises:
        InvalidInput: there are too many files.
        OSError: one cannot be read, or changes meanwhile.
    """
    files = {}
    for path in _files(folder):
        relative = path.relative_to(folder).as_posix()
        top = relative.split("/")[0]
        is_derived = top.startswith(GRAPH_PREFIX) and top != f"{GRAPH_PREFIX}{precision}"
        files[relative] = file_record(path, known, derived=is_derived)
        if len(files) > _MOST_FILES:
            raise InvalidInput(folder.name, f"has more than {_MOST_FILES} files")
    return ContentRecord(FORMAT, files)


def file_record(path: Path, known: DigestCache, *, derived: bool = False) -> FileRecord:
    """Returns the entry of one file.

    Raises:
        OSError: it cannot be read, or changes meanwhile.
    """
    found = known.of_file(path)
    return FileRecord(found.stamp.size, found.sha256, _meaning(path), found.chunks, derived)


def _files(folder: Path) -> Iterator[Path]:
    """Returns the files anybody might load, in order; hidden ones are caches and scratch."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place) / name
            is_top = Path(place) == folder
            if name.startswith((".", *_WORD_NAMES)) or name.endswith(_WORDS):
                continue
            if is_top and (name == RECORD_FILE or name in _MEASURED):
                continue
            if path.is_file():
                yield path


def _meaning(path: Path) -> str | None:
    """Returns the digest of what a file says about the content; None: of all its bytes."""
    try:
        if path.name == "model.yaml":
            document: Any = yaml.safe_load(read_yaml_text(path))
            said: Any = {key: document.get(key, usual) for key, usual in _SERVING.items()}
        elif path.name == "blocks.json":
            said = json.loads(read_bounded(path, LARGEST_JSON_BYTES))
            del said["compute_ns"]
        elif path.name == "decoder.json":
            said = json.loads(read_bounded(path, LARGEST_JSON_BYTES))
            # As stored, which depends on the precision; and of the forms those that were made.
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
        return None  # what cannot be understood counts as it is; whoever reads it will say so
    return hashlib.sha256(text.encode()).hexdigest()
