"""The documents point at what exists: links, commands, make targets, folders."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cluster_harness import ROOT

DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("client/*.md"))
    if ".venv" not in path.parts
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = document.read_text()
    named = set(re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", text, re.M))
    missing = {name for pair in named for name in pair if name} - targets
    assert not missing


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    for page in ROOT.glob("docs/adr/0*.md"):
        assert page.name in index


def test_nothing_names_this_machine() -> None:
    done = subprocess.run(
        ["git", "grep", "-nE", r"/(work|farm)/|pypi\.or[g]|registry\.npmj[s]|/home/[a-z]"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if not line.startswith("tests/docs/")]
    assert not lines, lines
