"""Finds the data that scenario files name: tables, golden vectors, traces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from catenary_services.errors import InvalidInput

_OF_THE_REPOSITORY = Path(__file__).resolve().parents[3] / "tests" / "data"


def data_file(name: str, field: str) -> Path:
    """Returns a file by its path, or by its name below the folders of data.

    CATENARY_DATA, if set, is looked at first, then CATENARY_TRACES, the folder of whole traces,
    and then the repository's tests/data.

    Raises:
        InvalidInput: There is no such file; the error names `field` of the scenario file.
    """
    for path in _places(name):
        if path.is_file():
            return path.resolve()
    raise _missing(name, field)


def data_folder(name: str, field: str) -> Path:
    """Returns a folder by its name, looked up like a file.

    Raises:
        InvalidInput: There is no such folder; the error names `field` of the scenario file.
    """
    for path in _places(name):
        if path.is_dir():
            return path.resolve()
    raise _missing(name, field)


def _places(name: str) -> Iterator[Path]:
    for variable in ("CATENARY_DATA", "CATENARY_TRACES"):
        if root := os.environ.get(variable):
            yield Path(root) / name
    yield _OF_THE_REPOSITORY / name
    yield Path(name)


def _missing(name: str, field: str) -> InvalidInput:
    looked = os.environ.get("CATENARY_DATA") or _OF_THE_REPOSITORY
    return InvalidInput(
        field,
        f"there is no {name!r} in {looked}; set CATENARY_DATA to the folder that has it, or "
        "CATENARY_TRACES to that of the published traces",
    )
