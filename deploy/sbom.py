"""Writes bills of materials: what a release is made of, by name and pinned version, as CycloneDX.

    python deploy/sbom.py build/sbom          # `make sbom`

One for everything that may be installed (`constraints.txt`), one for each kind of GPU machine, and
one for the wheels that model files come from. The files are the same for the same pins.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOL = ROOT / ".venv-deploy" / "bin" / "cyclonedx-py"
LISTS = ("constraints", "constraints-cuda12", "constraints-cuda13", "models")


def write(folder: Path) -> list[Path]:
    """Writes a bill for each list of `requirements/`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in LISTS:
        target = folder / f"catenary-{name}.cdx.json"
        command = [
            *[str(TOOL), "requirements", str(ROOT / "requirements" / f"{name}.txt")],
            *["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"],
            *["--of", "JSON", "-o", str(target)],
        ]
        subprocess.run(command, check=True)
        made.append(target)
    return made


if __name__ == "__main__":
    for file in write(Path(sys.argv[1])):
        print(file)
