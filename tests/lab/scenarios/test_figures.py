"""Figures taken out of tables and facts by expressions, and judged against limits."""

from __future__ import annotations

import pytest

from catenary_lab.scenarios.figures import FILTERS, Figures, judged, less
from catenary_lab.scenarios.report import Table
from catenary_lab.scenarios.schema import Expectation
from catenary_services.errors import InvalidInput

ROWS = (("J=10", "16.54 (c 6)", "20"), ("- reference", "16.0", None), ("J=20", "34 %", 0.5))
TABLES = (Table("t", ("", "ours", "theirs"), ROWS),)
FACTS = {"runs": [{"case": "a", "took_s": 2.0}, {"case": "b", "took_s": 3.0}]}
FIGURES = Figures(TABLES, FACTS)


def test_figures_are_taken_from_tables_and_facts_by_their_names() -> None:
    assert FIGURES.cell(0, "J=10", "ours") == 16.54
    assert FIGURES.column(0, "ours") == [16.54, 0.34]
    assert FIGURES.column(0, "ours", "J=1") == [16.54]
    assert FIGURES.column(0, "ours", "J=1", reference=True) == [16.0]
    assert FIGURES.times(0, "ours", "theirs", "J=2") == [0.68]
    assert FIGURES.saved(0, "ours", "theirs", "J=2") == [1 - 0.68]
    assert FIGURES.values("runs", "took_s") == [2.0, 3.0]
    assert FIGURES.values("runs", "took_s", case="b") == [3.0]
    assert less([1.0], [4.0]) == [0.75]
    assert FILTERS["percents"]([0.172, 0.2]) == "17 to 20"
    assert FILTERS["range"]([1.01, 1.04], 1) == "1.0"


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(LookupError, match="J=30"):
        FIGURES.cell(0, "J=30", "ours")
    with pytest.raises(LookupError, match="J=30"):
        FIGURES.column(0, "ours", "J=30")
    with pytest.raises(LookupError, match="no column 'hers'"):
        FIGURES.column(0, "hers")
    with pytest.raises(LookupError, match="none of runs"):
        FIGURES.values("runs", "took_s", case="c")


@pytest.mark.parametrize(
    ("limit", "ok"),
    [
        ({"at_least": 2.5}, True),
        ({"at_least": 2.51}, False),
        ({"at_most": 2.5}, True),
        ({"at_most": 2.49}, False),
    ],
)
def test_a_figure_is_judged_against_its_limit(limit: dict[str, float], ok: bool) -> None:
    expected = Expectation(name="n", value='values("runs", "took_s")|mean', unit="s", **limit)
    (figure,) = judged([expected], TABLES, FACTS)
    assert (figure["name"], figure["value"], figure["unit"]) == ("n", 2.5, "s")
    assert figure["limit"] in limit.values()
    assert figure["ok"] is ok


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ('cell(0, "J=30", "ours")', "no row 'J=30'"),
        ("cell(1, 'J=10', 'ours')", "index out of range"),
        ("facts.walks|length", "'walks'"),
        ("''.__class__.__mro__", "unsafe"),
        ("1 / 0", "division by zero"),
        ("facts.runs", "must be a"),
    ],
)
def test_what_cannot_be_computed_is_named(value: str, problem: str) -> None:
    expected = Expectation(name="speed", value=value, at_least=1)
    with pytest.raises(InvalidInput, match=rf"expect\.speed: cannot be computed: .*{problem}"):
        judged([expected], TABLES, FACTS)
