"""Steps the wall clock of single processes, as an administrator or a bad time server would."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("clock_step.c")


class SteppedClock:
    """The wall clock of every process that is started with `environment`."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{name}.step"
        self._file.write_bytes(struct.pack("q", 0))
        self._library = _library(folder)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CLOCK_STEP_FILE": str(self._file)}

    def step(self, seconds: int) -> None:
        """Sets the clock so much ahead of the true time (negative: behind)."""
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 8) as shared:
            shared[:] = struct.pack("q", seconds)


def _library(folder: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("stepping a clock needs a C compiler (cc)")
    library = folder / "clock_step.so"
    if not library.exists():
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-o", library, _SOURCE, "-ldl"], check=True
        )
    return library
