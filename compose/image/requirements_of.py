"""Prints what the project and the named extras depend on, one requirement a line.

    python3 requirements_of.py platform,onnx

So dependencies can be installed, and kept as a layer, before any source of the project is there.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Returns the requirements of the project itself and of `extras`, each once, sorted."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    unknown = set(extras) - set(optional)
    if unknown:
        sys.exit(f"no such extra: {', '.join(sorted(unknown))}; there are {', '.join(optional)}")
    return sorted({*project["dependencies"], *(line for name in extras for line in optional[name])})


if __name__ == "__main__":
    wanted = [name for name in (*sys.argv[1:], "")[0].split(",") if name]
    print(*requirements(Path("pyproject.toml"), wanted), sep="\n")
