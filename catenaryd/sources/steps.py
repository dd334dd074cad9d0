"""The steps of an import as they are told: to people, and to the scheduler that asked for it.

A scheduler reads them from the standard output of the process that imports, one JSON object a line.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import msgspec

LARGEST_LINE_BYTES = 1 << 16
_Text = Annotated[str, msgspec.Meta(max_length=16_384)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class ImportPhase(StrEnum):
    """The phases of an import."""

    LISTED = "listed"
    """The files are known, and how long fetching them may take."""
    FETCHING = "fetching"
    IMPORTING = "importing"
    DONE = "done"
    FAILED = "failed"


class ImportStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is told of an import."""

    phase: ImportPhase
    text: _Text = ""
    """A sentence for people; the error, if it failed."""
    file: _Text = ""
    """The file that is being fetched."""
    done_bytes: _Size = 0
    total_bytes: _Size = 0
    """Size of all files together."""
    model: _Text = ""
    """Name of the version, once it is known."""
    version: _Text = ""
    known: bool = False
    """True if the repository had it already."""
    reason: _Text = ""
    """The kind of error, if it failed."""
    field: _Text = ""
    """The input that was wrong, if the error names one."""


Tell = Callable[[ImportStep], None]


def amount(count: float) -> str:
    """Returns a number of bytes for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def span(seconds: float) -> str:
    """Returns a duration for people, such as "about 3 min"."""
    if seconds < 1:
        return "under a second"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"
