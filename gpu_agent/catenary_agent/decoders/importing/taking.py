"""Transfer of weight files from a folder to the repository, as links or as copies.

The files are not read here. The jail has read their headers, and agents later compare every byte
with the version's content record.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from catenary_agent.decoders.model_files.weights import is_own_file
from catenary_services.errors import InvalidInput
from catenary_services.models.staging import link_or_copy

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\.safetensors")


def take_over(source: Path, folder: Path, names: Collection[str], *, copies: bool) -> None:
    """Brings files of a source into a folder of the repository.

    They are linked where that is safe (`link_or_copy`). If somebody changes a linked file in place,
    the version no longer fits its content record, and no agent loads it.

    Args:
        source: The folder with the files.
        folder: The folder in the repository.
        names: The names of the files as reported by the jail, so they are not trusted.
        copies: Whether all files are copied.

    Raises:
        InvalidInput: A name is not that of a weight file in the source.
    """
    for name in sorted(names):
        if not _NAME.fullmatch(name) or not is_own_file(source, name):
            raise InvalidInput(source.name, f"has no file of weights called {name[:100]!r}")
        link_or_copy(source / name, folder / name, copies=copies)
