"""Public classes are called in words that a reader can look up: the glossary's, or programming English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_harness import ROOT

PACKAGES = (
    "scheduler/catenary_scheduler",
    "simulator/catenary_simulator",
    "catenaryd",
    "gateway/catenary_gateway",
    "gpu_agent/catenary_agent",
    "services/catenary_services",
    "client/catenary",
)
PRIVATE = {
    "asked",
    "board",
    "campaign",
    "crew",
    "deference",
    "desk",
    "doubting",
    "fleet",
    "half",
    "helm",
    "made",
    "meeting",
    "office",
    "overseer",
    "patience",
    "roster",
    "rhythm",
    "seat",
    "seating",
    "shard",
    "sight",
    "steering",
    "stray",
    "straying",
    "surroundings",
    "term",
    "ticket",
    "verdict",
    "wanted",
    "ways",
    "wish",
    "yard",
}
"""Words that once were class names here and that nobody from outside understood."""


def public_classes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields file and name of every top-level class that does not begin with an underscore."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield path.relative_to(ROOT).as_posix(), node.name


def words_of(name: str) -> list[str]:
    """Returns the words of a CamelCase name, small: `KvBudget` has `kv` and `budget`."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|\d+", name)]


def forms_of(word: str) -> set[str]:
    """Returns what a word may be a form of: `caches` of `cache`, `booked` of `book`, `bodies` of `body`."""
    forms = {word}
    for ending, instead in (
        ("s", ("",)),
        ("es", ("", "is")),
        ("ies", ("y",)),
        ("ied", ("y",)),
        ("est", ("", "e")),
        ("d", ("",)),
        ("ed", ("",)),
        ("ing", ("", "e")),
        ("er", ("", "e")),
        ("r", ("",)),
    ):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            forms |= {word[: -len(ending)] + each for each in instead}
    return forms | {form[:-1] for form in forms if len(form) > 3 and form[-1] == form[-2]}


def glossary_words() -> set[str]:
    """Returns the words of the first column of every table of the glossary."""
    rows = re.findall(r"(?m)^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text())
    return {word for row in rows for word in re.findall(r"[a-z]+", row.lower())} - {"word", "verb"}


def programming_words() -> set[str]:
    """Returns the words of the list beside this file; lines that begin with # are comments."""
    lines = (Path(__file__).parent / "programming_words.txt").read_text().splitlines()
    return {word for line in lines if not line.startswith("#") for word in line.split()}


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Every word a class may be called by, with its forms."""
    words = glossary_words() | programming_words()
    return words | {form for word in words for form in forms_of(word)}


@pytest.mark.parametrize("package", PACKAGES)
def test_class_names_are_made_of_words_a_reader_can_look_up(package: str, known: set[str]) -> None:
    unknown: dict[str, list[str]] = {}
    for path, name in public_classes(ROOT / package):
        for word in words_of(name):
            if not forms_of(word) & known:
                unknown.setdefault(word, []).append(f"{name} ({path})")
    assert not unknown, "neither in docs/glossary.md nor in tests/docs/programming_words.txt"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_name_has_a_word_of_the_private_language(package: str) -> None:
    found = [
        f"{name} ({path})"
        for path, name in public_classes(ROOT / package)
        if any(
            form in PRIVATE for word in words_of(name) for form in (word, word.removesuffix("s"))
        )
    ]
    assert not found


def test_the_list_of_programming_words_holds_none_of_the_private_language() -> None:
    assert not programming_words() & PRIVATE


def test_two_classes_of_the_scheduler_never_have_the_same_name() -> None:
    places: dict[str, list[str]] = {}
    for path, name in public_classes(ROOT / "scheduler/catenary_scheduler"):
        places.setdefault(name, []).append(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


@pytest.mark.parametrize(
    ("word", "base"),
    [
        ("caches", "cache"),
        ("booked", "book"),
        ("bodies", "body"),
        ("planner", "plan"),
        ("axes", "axis"),
    ],
)
def test_a_word_is_known_in_its_usual_forms(word: str, base: str) -> None:
    assert base in forms_of(word)
    assert "gate" not in forms_of("gateway")
