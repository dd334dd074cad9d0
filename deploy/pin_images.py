"""Looks up the digests of the images that others make, and writes them for compose.

    python deploy/pin_images.py          # writes compose/compose.pinned.yaml, prints the base image

A tag can be moved, a digest cannot. It asks the registry by `docker buildx imagetools inspect`, so
it runs where one is reached: before a release (docs/releasing.md). Build and start with
COMPOSE_MORE=compose.pinned.yaml and the BASE_IMAGE that is printed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

COMPOSE = Path(__file__).parents[1] / "compose"
PINNED = "compose.pinned.yaml"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARGUMENT = re.compile(r"^ARG BASE_IMAGE=(\S+)$", re.MULTILINE)


def digest_of(image: str) -> str:
    """Returns the digest that the registry has for an image now."""
    command = ["docker", "buildx", "imagetools", "inspect", image]
    done = subprocess.run(
        [*command, "--format", "{{.Manifest.Digest}}"], capture_output=True, text=True, check=False
    )
    found = _DIGEST.fullmatch(done.stdout.strip())
    if done.returncode != 0 or found is None:
        sys.exit(f"{image}: the registry gave no digest: {(done.stderr or done.stdout).strip()}")
    return found[0]


def foreign_images(folder: Path) -> dict[str, str]:
    """Returns the images of services that are not built here, by the service."""
    services = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))["services"]
    return {name: each["image"] for name, each in services.items() if "build" not in each}


def pin(folder: Path) -> str:
    """Writes the file of digests; returns the base image with its digest."""
    services = {
        name: {"image": f"{image}@{digest_of(image)}"}
        for name, image in foreign_images(folder).items()
    }
    text = yaml.safe_dump({"services": services}, width=200)
    (folder / PINNED).write_text(f"# Made by deploy/pin_images.py.\n{text}", encoding="utf-8")
    base = _ARGUMENT.search((folder / "Dockerfile").read_text(encoding="utf-8"))
    assert base is not None
    return f"{base[1]}@{digest_of(base[1])}"


if __name__ == "__main__":
    print(f"BASE_IMAGE={pin(COMPOSE)}")
