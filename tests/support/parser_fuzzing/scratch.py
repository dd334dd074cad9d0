"""A folder in memory, for parsers of files: they are written thousands of times a second."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

_KEPT: list[Any] = []
"""Folders that are removed with the process."""


@cache
def scratch_folder() -> Path:
    """Returns the folder of this process."""
    made = tempfile.TemporaryDirectory(prefix="parsers-", dir="/dev/shm")
    _KEPT.append(made)
    return Path(made.name)


def scratch_file(name: str, data: bytes) -> Path:
    """Writes a file there, and returns its path."""
    path = scratch_folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path
