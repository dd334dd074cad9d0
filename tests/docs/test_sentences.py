"""Docstrings say something: no fragments, and no repetition of a function's name.

This is the part of section "sentences" of the house rules that a machine can keep. It holds for the
packages listed here; the list grows as packages are gone through.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from cluster_harness import ROOT

PLACES = (
    "services/catenary_services",
    "client/catenary",
    "catenaryd",
    "gateway/catenary_gateway",
    "gpu_agent/catenary_agent",
    "scheduler/catenary_scheduler",
    "simulator/catenary_simulator",
    "lab/catenary_lab",
    "docs_build",
    "benchmarks",
    "protos/generate.py",
    "source_roots.py",
    "build_native.py",
    "hatch_build.py",
)
FEWEST_WORDS = 3
_WORD = re.compile(r"[A-Za-z0-9]+")
# A sentence that begins with one of these has its subject in a neighbour, or none.
OPENINGS = frozenset(
    _WORD.findall(
        """as at behind beside between by for from in inside into of on since than to under until
        with without he her him his it its she their them they those whose who whom whoever what
        whatever when where which how why is was are were"""
    )
)
# Words that add nothing to the words of a name.
FILLERS = frozenset(
    _WORD.findall(
        """a all an and as are be by do does each every for from get gets give gives in into is it
        its make makes of on one or returns return set sets some that the their these this to true
        false whether if with yield yields"""
    )
)
_NAME_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and fault of every docstring that is a fragment or repeats its function's name.

    The string below an assignment counts as the docstring of what is assigned.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Documented):
            continue
        for number, statement in enumerate(node.body):
            if not _is_text(statement):
                continue
            is_own = number == 0
            if is_own or isinstance(node.body[number - 1], ast.Assign | ast.AnnAssign):
                name = node.name if is_own and not isinstance(node, ast.Module) else ""
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                fault = fault_of(statement.value.value, name if is_function else "")  # type: ignore[attr-defined]
                if fault:
                    yield statement.lineno, fault


def fault_of(text: str, function: str = "") -> str:
    """Returns what is wrong with a docstring in words; empty if nothing is."""
    words = _WORD.findall(text)
    said = " ".join(text.split())[:60]
    if len(words) < FEWEST_WORDS:
        return f"{said!r} has fewer than {FEWEST_WORDS} words"
    if words[0].lower() in OPENINGS and text.strip().startswith(words[0]):
        return f"{said!r} begins with {words[0]!r}, without a subject"
    of_name = {_stem(part) for part in _NAME_PART.findall(function)}
    if function and {_stem(word) for word in words if word.lower() not in FILLERS} <= of_name:
        return f"{said!r} only repeats the name {function!r}"
    return ""


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _stem(word: str) -> str:
    return word.lower().removesuffix("s")


@pytest.mark.parametrize("place", PLACES)
def test_docstrings_are_sentences_that_stand_alone(place: str) -> None:
    path = ROOT / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files, f"{place} holds no Python file"
    found = [
        f"{file.relative_to(ROOT)}:{line}: {fault}"
        for file in files
        for line, fault in faults(file.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("By now.", ""),
        ("Of the payload.", ""),
        ("Does it.", ""),
        ("They; where others serve the model, without those of agents that are to go.", ""),
        ("What a library of arrays does in its own way.", ""),
        ("Returns the page.", "metrics_page"),
        ("Returns the names of all models.", "model_names"),
    ],
)
def test_riddles_and_repetitions_are_found(text: str, function: str) -> None:
    assert fault_of(text, function)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("Operations that NumPy and PyTorch spell differently.", ""),
        ("Returns the names of all models, sorted by version.", "model_names"),
        ('"onnxruntime_onnx", "pytorch_exported" or "decoder".', ""),
    ],
)
def test_sentences_are_let_through(text: str, function: str) -> None:
    assert not fault_of(text, function)


def test_strings_below_assignments_are_looked_at_and_others_are_not() -> None:
    source = 'A = 1\n"""By now."""\n\n\ndef f():\n    print()\n    """Of it."""\n'
    assert [line for line, _ in faults(source)] == [2]
