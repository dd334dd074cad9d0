"""Commands that the documents name exist, with the options they are given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from catenaryd.command_line import cli
from cluster_harness import ROOT
from docs_build.reference.commands import client_command, subcommands

ROOTS: dict[str, Any] = {"catenaryd": cli, "catenary": client_command()}
DOCUMENTS = sorted(
    path
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("client/*.md"))
    if re.search(r"\bcatenaryd? [a-z]", path.read_text())
)
_INLINE = re.compile(r"`((?:\.venv/bin/)?catenaryd? [^`\n]+)`")
_LINE = re.compile(r"^(?: {4,}|\$ )?((?:\.venv/bin/)?catenaryd? (?! )[^\n]*)$", re.M)


def _named(text: str) -> Iterator[list[str]]:
    """Yields the words of every command in code: spans, indented lines, fenced lines."""
    text = text.replace("\\\n", " ")
    for span in _INLINE.findall(text):
        yield from _words(span)
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside or line.startswith("    "):
            for command in _LINE.findall(line):
                yield from _words(command)


def _words(command: str) -> Iterator[list[str]]:
    for part in re.split(r"\s(?:\||&&|;|>)\s", command):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:  # not a command line after all
            continue
        if words and Path(words[0]).name in ROOTS:
            yield [Path(words[0]).name, *words[1:]]


def _parameters(command: Any) -> dict[str, bool]:
    """Returns option -> whether a value follows."""
    found = {"--help": False, "-h": False}
    for parameter in command.params:
        for name in (*parameter.opts, *getattr(parameter, "secondary_opts", ())):
            found[name] = not getattr(parameter, "is_flag", False)
    return found


def _problem(words: list[str]) -> str:
    command, rest = ROOTS[words[0]], words[1:]
    path = words[0]
    while rest:
        word = rest.pop(0)
        children = subcommands(command)
        if word.startswith("-"):
            name, assigned, _ = word.partition("=")
            known = _parameters(command)
            if name not in known:
                return f"{path} has no {name}"
            if known[name] and not assigned and rest:
                rest.pop(0)
        elif children and re.fullmatch(r"[a-z][a-z-]*", word):
            if word not in children:
                return f"{path} has no command {word}"
            command, path = children[word], f"{path} {word}"
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_their_options_exist(document: Path) -> None:
    problems = [problem for words in _named(document.read_text()) if (problem := _problem(words))]
    assert not problems


def test_a_wrong_command_would_be_noticed() -> None:
    named = list(
        _named("`catenaryd plan pols`, `catenary infer m --imag x`\n\n    catenaryd upp\n")
    )
    assert [bool(_problem(words)) for words in named] == [True, True, True]
