"""Public names are made of words that a reader can look up: the glossary's, or plain English.

These are the names of classes, and what operators see: metrics, settings, options, fields of
messages and events in the logs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from catenary_protos.catenary.v1 import admin_pb2, agent_pb2, common_pb2, scheduler_pb2
from catenary_services.settings import RENAMED
from catenary_services.telemetry.metric_table import declared_metrics
from catenaryd.command_line import cli
from cluster_harness import ROOT
from docs_build.reference.commands import client_command, leaves
from docs_build.reference.settings import PROCESSES

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
    "door",
    "doubting",
    "fleet",
    "guard",
    "half",
    "helm",
    "lane",
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
    "wishes",
    "yard",
}
"""Words that once were class names here and that nobody from outside understood."""
ENGLISH = {"made", "wanted"}
"""Those of them that are plain English where they are no class: `agents_wanted`, `made_ns`."""
METRICS = list(declared_metrics().values())


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


def listed_words(file: str) -> set[str]:
    """Returns the words of a list beside this file; lines that begin with # are comments."""
    lines = (Path(__file__).parent / file).read_text().splitlines()
    return {word for line in lines if not line.startswith("#") for word in line.split()}


def programming_words() -> set[str]:
    """Returns the words classes may have beside those of the glossary."""
    return listed_words("programming_words.txt")


def with_forms(words: set[str]) -> set[str]:
    """Returns words with what each may be a form of."""
    return words | {form for word in words for form in forms_of(word)}


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Every word a class may be called by, with its forms."""
    return with_forms(glossary_words() | programming_words())


def metric_names() -> Iterator[tuple[str, str]]:
    """Yields each metric with its name and the names of its labels."""
    for metric in METRICS:
        for name in (metric.name, *metric.labels):
            yield f"metric {metric.name}", name


def setting_names() -> Iterator[tuple[str, str]]:
    """Yields each setting with its process."""
    for process, cls in PROCESSES.items():
        for name in cls.model_fields:
            yield f"setting of the {process}", name


def option_names() -> Iterator[tuple[str, str]]:
    """Yields the words of every command, and its options and arguments."""
    for program, root in (("catenaryd", cli), ("catenary", client_command())):
        for path, command in leaves(root, program):
            yield from ((path, word) for word in path.split())
            yield from ((path, parameter.name) for parameter in command.params)


def field_names() -> Iterator[tuple[str, str]]:
    """Yields the fields of messages, which JSON has, too."""
    for module in (admin_pb2, agent_pb2, common_pb2, scheduler_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            yield from ((message.full_name, field.name) for field in message.fields)


def event_names() -> Iterator[tuple[str, str]]:
    """Yields the names of events that the product logs."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in re.findall(r'\b_log\.\w+\(\s*"([a-z_]+)"', path.read_text()):
                yield path.relative_to(ROOT).as_posix(), name


def parts_of(name: str) -> list[str]:
    """Returns the words of a name with underscores or hyphens."""
    return [word for word in re.split(r"[_-]", name.lower()) if word]


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


@pytest.mark.parametrize(
    "names", [metric_names, setting_names, option_names, field_names, event_names]
)
def test_nothing_that_operators_see_has_a_word_of_the_private_language(
    names: Callable[[], Iterator[tuple[str, str]]],
) -> None:
    seen = list(names())
    assert len(seen) > 90
    private = PRIVATE - ENGLISH
    found = [
        f"{name} ({place})"
        for place, name in seen
        for word in parts_of(name)
        if {word, word.removesuffix("s")} & private
    ]
    assert not found


@pytest.mark.parametrize("names", [metric_names, setting_names])
def test_metrics_and_settings_are_made_of_words_a_reader_can_look_up(
    names: Callable[[], Iterator[tuple[str, str]]],
) -> None:
    words = glossary_words() | programming_words() | listed_words("operating_words.txt")
    known = with_forms(words)
    unknown = [
        f"{word} in {name} ({place})"
        for place, name in names()
        for word in parts_of(name)
        if not forms_of(word) & known
    ]
    assert not unknown, "neither in docs/glossary.md nor in a list of words in tests/docs"


def test_renamed_settings_have_their_new_names_and_no_old_one() -> None:
    settings = {name for _, name in setting_names()}
    assert set(RENAMED.values()) <= settings
    assert not set(RENAMED) & settings
    changes = (ROOT / "CHANGELOG.md").read_text()
    for old, new in RENAMED.items():
        assert f"`{old}` → `{new}`" in changes


def test_the_lists_of_words_hold_none_of_the_private_language() -> None:
    assert not programming_words() & PRIVATE
    assert not listed_words("operating_words.txt") & (PRIVATE - ENGLISH)


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
