"""Golden vectors, tables and traces that tests compare with: tests/data, unless CATENARY_DATA is set."""

from __future__ import annotations

from pathlib import Path

from catenary_lab.scenarios.data import data_file, data_folder


def reference(name: str) -> Path:
    """Returns a file or a folder of them by its name, such as "ppipe" or "chain/golden.json".

    Raises:
        InvalidInput: If there is none; nothing skips for want of data.
    """
    find = data_file if Path(name).suffix else data_folder
    return find(name, "reference data")
