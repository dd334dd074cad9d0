"""Runs a program of the GPU day on a bare machine.

    python -m benchmarks.gpu.call check|speed|platform [--tiny] [--only STAGE ..] [--out DIR]

It needs the standard library only. It installs the wheels of `.whl/` (`make gpu-wheels`) into a
folder, puts that and the checkout in front of everything else on the path, and becomes the program.
The scheduler runs uncompiled, because nothing is built here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from source_roots import ROOT, SOURCE_ROOTS

WHEELS = ROOT / ".whl"
PROGRAMS = ("check", "speed", "platform")


def install(site: Path) -> None:
    """Installs every wheel into `site`, unless exactly these are there."""
    wheels = sorted(WHEELS.glob("*.whl"))
    stamp = site / ".wheels"
    wanted = "\n".join(wheel.name for wheel in wheels)
    if not wheels or (stamp.is_file() and stamp.read_text() == wanted):
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    command += ["--disable-pip-version-check", *map(str, wheels)]
    subprocess.run(command, check=True)
    stamp.write_text(wanted)


def environment(site: Path) -> dict[str, str]:
    """Returns the environment of a program."""
    paths = [site, *SOURCE_ROOTS, ROOT / "tests" / "support"]
    before = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return {
        **os.environ,
        "CATENARY_PURE": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *before]),
        "PYTHONUNBUFFERED": "1",
    }


def main() -> None:
    """Becomes the program that the command line names."""
    if len(sys.argv) < 2 or sys.argv[1] not in PROGRAMS:
        sys.exit(f"name one of {', '.join(PROGRAMS)}")
    site = Path(os.environ.get("GPU_SITE") or ROOT / "build" / "gpu-site")
    install(site)
    os.chdir(ROOT)
    command = [sys.executable, "-m", f"benchmarks.gpu.{sys.argv[1]}", *sys.argv[2:]]
    os.execve(sys.executable, command, environment(site))


if __name__ == "__main__":
    main()
