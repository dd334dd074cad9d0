"""docs/failures.md promises what the chaos runs hold the cluster to, of every fault they know."""

from __future__ import annotations

import pytest

from faults.all_faults import REGISTRY
from faults.page import PAGE, measured, recovered_text, rows, served_text, with_figures

ROWS = rows(PAGE.read_text())


def test_the_page_has_a_row_for_every_fault_and_no_other() -> None:
    assert sorted(ROWS) == sorted(REGISTRY)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_row_promises_what_the_code_promises(name: str) -> None:
    row, kind = ROWS[name], REGISTRY[name]
    assert row.about == kind.about
    assert (row.served, row.recovered) == (served_text(kind.promise), recovered_text(kind.promise))
    assert row.client
    assert row.cluster in {"A", "B", "C"}, "which cluster it was measured with"


def test_figures_of_faults_that_came_alone_are_put_into_the_page() -> None:
    spells = [
        {"faults": ["cut"], "recovered_s": 1.0},
        {"faults": ["cut"], "recovered_s": 3.0},
        {"faults": ["cut", "loss"], "recovered_s": 9.0},
        {"faults": ["loss"], "recovered_s": None},
    ]
    figures = measured([{"spells": spells}])
    assert figures == {"cut": "2.0 s, 3.0 s (2)"}
    page = with_figures(PAGE.read_text(), figures)
    assert rows(page)["cut"].measured == "2.0 s, 3.0 s (2)"
    assert rows(page)["loss"].measured == ROWS["loss"].measured
