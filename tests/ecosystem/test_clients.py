"""Clients that others wrote, unmodified, do with a cluster what docs/clients.md says of them.

Each has an environment of its own, which `make ecosystem` makes from `requirements/ecosystem`, and
a script below `clients/`, such as a user of that client would write.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cluster_harness import ROOT
from docs_build.client_tables import Client, Outcome, clients, recorded, save

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
RECORDS = bool(os.environ.get("CATENARY_RECORD"))
LONGEST_S = 600.0


@pytest.mark.parametrize("name", clients())
def test_a_client_does_what_the_page_says(name: str, known: dict[str, str], tmp_path: Path) -> None:
    found = run(name, known, tmp_path)
    failed = [each for each in found.features if each.state == "failed"]
    assert not failed, "\n\n".join(f"{each.feature}: {each.reason}" for each in failed)
    if RECORDS:
        save(name, found)
    assert recorded()[name] == found, "`make ecosystem RECORD=1` writes the page anew"


def run(name: str, known: dict[str, str], folder: Path) -> Client:
    """Runs the script of a client in its environment, and returns what it printed."""
    binaries = ROOT / ".venv-ecosystem" / name / "bin"
    if not binaries.exists():
        pytest.skip(f"`make ecosystem ONLY={name}` installs it")
    (script,) = HERE.glob(f"clients/*/{name}.py")
    done = subprocess.run(
        # -P: a script that is named like its library does not hide it.
        [str(binaries / "python"), "-P", str(script)],
        cwd=folder,
        env={
            **known,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": str(HERE / "reporting"),
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    first, *features = lines
    return Client(first["version"], tuple(Outcome(**each) for each in features))
