"""JSON files of this user alone, replaced whole: a crash leaves the old one or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from catenary_services.bounded_files import read_bounded
from catenary_services.errors import InvalidInput

LARGEST_BYTES = 32 << 20
T = TypeVar("T")


def read_json(file: Path, made_of: Callable[[Any], T]) -> T | None:
    """Returns what `made_of` makes of a file's document; None if there is no such file.

    Raises:
        InvalidInput: The file cannot be read, or `made_of` finds that it has another form.
    """
    try:
        return made_of(json.loads(read_bounded(file, LARGEST_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInput(file.name, f"{file} cannot be read: {error}") from error


def write_json(file: Path, document: object) -> None:
    """Replaces a file, readable by its owner only; it is on the disk when this returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.new")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as output:
        json.dump(document, output, indent=1)
        output.flush()
        os.fsync(output.fileno())
    scratch.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name must survive a crash as well
    finally:
        os.close(folder)
