"""Fetches the wheels for a GPU machine: `python -m benchmarks.gpu.wheels [--target .whl]`.

It needs the standard library only. Wheels are for CPython 3.12 on x86-64 Linux whatever runs here,
exactly those of requirements/gpu-machine.txt, and together no larger than can be copied there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "requirements" / "gpu-machine.txt"
MOST_BYTES = 40 << 20
# pip matches a wheel's platform by its exact name, and wheels name many.
_GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_OLD_NAMES = ("manylinux2014", "manylinux2010", "manylinux1")


def wanted() -> list[str]:
    """Returns the requirements, one for each wheel."""
    lines = LIST.read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def fetch(target: Path) -> None:
    """Downloads missing wheels, and removes those that are no longer required."""
    target.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    platforms += [f"{name}_x86_64" for name in _OLD_NAMES]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    command += ["--implementation", "cp", "-d", str(target), "-r", str(LIST)]
    for each in platforms:
        command += ["--platform", each]
    subprocess.run(command, check=True)
    names = {_plain(*each.split("==")) for each in wanted()}
    for wheel in target.glob("*.whl"):
        if _plain(*wheel.name.split("-")[:2]) not in names:
            wheel.unlink()


def _plain(name: str, version: str) -> tuple[str, str]:
    return re.sub(r"[-_.]+", "_", name).lower(), version


def main() -> None:
    """Fetches the wheels; exits with 1 if they are too large, or not complete."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument("--target", type=Path, default=ROOT / ".whl")
    target = parser.parse_args().target
    fetch(target)
    wheels = list(target.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {total / (1 << 20):.1f} MiB in {target}")
    if len(wheels) != len(wanted()):
        sys.exit(f"{len(wanted())} wheels are wanted")
    if total > MOST_BYTES:
        sys.exit(f"more than the {MOST_BYTES >> 20} MiB that may travel")


if __name__ == "__main__":
    main()
