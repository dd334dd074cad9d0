"""What the security page says cannot happen is tried by a test that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from cluster_harness import ROOT

PAGES = ("security.md", "threat-model.md")
_CLAIM = re.compile(r"\b(?:cannot|can not|never)\b", re.IGNORECASE)
_REFERENCE = re.compile(r"`(?:(tests/[\w/]+\.py)(?:::(test_\w+))?|(test_\w+))`")
_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
SOURCES = ("client", "gateway", "gpu_agent", "scheduler", "services", "catenaryd")


@cache
def named_in(file: Path) -> frozenset[str]:
    return frozenset(_TEST.findall(file.read_text(encoding="utf-8")))


@cache
def every_test() -> frozenset[str]:
    return frozenset().union(*(named_in(file) for file in (ROOT / "tests").rglob("test_*.py")))


def claims(text: str) -> Iterator[str]:
    """Yields the parts of a page that say what cannot happen.

    A part is a paragraph, an item of a list or the row of a table: each that is not empty in a
    column headed "cannot", and each of a table with a column "tried by".
    """
    text = re.sub(r"^(?: {4}.*\n)+", "\n", text, flags=re.MULTILINE)  # examples
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("|"):
            yield from _rows(block.splitlines())
        elif not block.startswith("#"):
            items = re.split(r"\n(?=[*-] )", block)
            yield from (item for item in items if _CLAIM.search(item))


def _rows(lines: list[str]) -> Iterator[str]:
    heads = _cells(lines[0])
    column = next((at for at, head in enumerate(heads) if _CLAIM.search(head)), None)
    for line in lines[2:]:
        is_claim = "tried by" in heads if column is None else bool(_cells(line)[column])
        if is_claim or _CLAIM.search(line):
            yield line


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def faults(text: str) -> Iterator[str]:
    for claim in claims(text):
        if not _REFERENCE.search(claim):
            yield f"names no test: {claim[:120]}"
    for path, test, alone in _REFERENCE.findall(text):
        if path and not (ROOT / path).is_file():
            yield f"there is no {path}"
        elif path and test and test not in named_in(ROOT / path):
            yield f"there is no {test} in {path}"
        elif alone and alone not in every_test():
            yield f"there is no {alone}"


@pytest.mark.parametrize("page", PAGES)
def test_whatever_cannot_happen_is_tried_by_a_test_that_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert len(list(claims(text))) > 3
    assert list(faults(text)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A gateway cannot drain.", "names no test"),
        ("It is never run (`test_that_is_not_there`).", "there is no test_that_is_not_there"),
        ("One cannot (`tests/docs/test_nowhere.py`).", "there is no tests/docs/test_nowhere.py"),
        ("One cannot (`tests/docs/test_rooms.py::test_x`).", "there is no test_x in"),
        ("| who | cannot |\n|---|---|\n| anyone | read |", "names no test"),
        ("* fine\n* it never ends", "names no test"),
    ],
)
def test_a_claim_without_a_test_is_found(text: str, said: str) -> None:
    [fault] = faults(text)
    assert said in fault


def test_words_that_only_contain_one_are_no_claims() -> None:
    assert not list(claims("whenever it starts\n\n| a | cannot |\n|---|---|\n| all | |"))


def test_code_that_comes_with_a_model_is_asked_for_nowhere() -> None:
    asked = [
        (file, found)
        for place in SOURCES
        for file in (ROOT / place).rglob("*.py")
        for found in re.findall(r"trust_remote_code\s*=\s*(\w+)", file.read_text("utf-8"))
    ]
    assert asked
    assert {found for _, found in asked} == {"False"}
