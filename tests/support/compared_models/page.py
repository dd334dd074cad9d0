"""The rows of docs/families.md: what was compared with what, and what was refused.

Every row is made by a test that runs the real import and the real executors. The page keeps what
they found: a test fails where its row is missing or a difference is ten times as large as there,
and `tests/docs/pages/test_families_page.py` where a row has no test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

PAGE = Path(__file__).resolve().parents[3] / "docs" / "families.md"
_COMPARED = re.compile(
    r"^\| ([^|]+) \| `([^`|]+)` \| ([^|]+) \| ([^|]+) \| (\d(?:e-\d+)?) \|$", re.MULTILINE
)
_REFUSED = re.compile(r"^\| ([^|]+) \| `([^`|]+)` \| `([^`|]+)` \|$", re.MULTILINE)
_FACTOR = 10.0
"""How far a difference on another machine may be from the written one: products of matrices add in
another order there."""
_ROUNDING = 1e-7
"""A difference that is as good as none."""
_LEFT_OUT = ".."
"""What a sentence on the page has where another library, or where the model is cut, says more."""


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """A comparison: the form of the files, the model, and who runs it."""

    files: str
    model: str
    executor: str


@dataclass(frozen=True, slots=True)
class Written:
    """What the page says of a comparison."""

    against: str
    difference: float


@cache
def written() -> dict[Row, Written]:
    """Returns the comparisons on the page."""
    return {
        Row(files, model, executor): Written(against, float(difference))
        for files, model, executor, against, difference in _COMPARED.findall(PAGE.read_text())
    }


@cache
def refusals() -> dict[tuple[str, str], str]:
    """Returns the sentences on the page, by the form of the files and what is special of them."""
    return {(files, what): said for files, what, said in _REFUSED.findall(PAGE.read_text())}


def check_written(row: Row, against: str, difference: float) -> None:
    """Asserts that the page has a comparison, with a difference as large as found."""
    parts = (row.files, f"`{row.model}`", row.executor, against, rounded_up(difference))
    line = f"| {' | '.join(parts)} |"
    said = written().get(row)
    assert said is not None, f"{PAGE.name} lacks: {line}"
    assert said.against == against, f"{PAGE.name} should have: {line}"
    assert difference <= _FACTOR * max(said.difference, _ROUNDING), (
        f"{PAGE.name} should have: {line}"
    )


def check_refused(files: str, what: str, sentence: str) -> None:
    """Asserts that the page has the sentence with which something is refused."""
    line = f"| {files} | `{what}` | `{sentence}` |"
    said = refusals().get((files, what))
    assert said is not None, f"{PAGE.name} lacks: {line}"
    pattern = ".*".join(re.escape(piece.strip()) for piece in said.split(_LEFT_OUT))
    same = re.fullmatch(pattern, sentence, re.DOTALL)
    assert same, f"{PAGE.name} should have: {line}"


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference of two arrays, as a part of the largest expected number."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    most = np.abs(expected.astype(np.float64)).max()
    assert most > 0  # a comparison with nothing says nothing
    return float(np.abs(found.astype(np.float64) - expected).max() / most)


def rounded_up(difference: float) -> str:
    """Returns a difference as the page has it: one digit, not less than it is."""
    if difference == 0:
        return "0"
    power = int(np.floor(np.log10(difference)))
    digit = int(np.ceil(difference / 10.0**power))
    return f"{digit}e{power}" if digit < 10 else f"1e{power + 1}"
