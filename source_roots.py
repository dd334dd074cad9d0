"""The folders from which this checkout's packages are imported, as in an editable install."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
_BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
SOURCE_ROOTS: list[str] = [str(ROOT / part) for part in _BUILD["dev-mode-dirs"]]
IMPORT_PATH = os.pathsep.join(SOURCE_ROOTS)
"""The source roots in the form of PYTHONPATH."""
