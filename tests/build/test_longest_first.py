"""Long files are begun first, in every process in the same order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from cluster_harness import ROOT
from suite_rules.longest_first import LONGEST, longest_first


@pytest.mark.parametrize("file", LONGEST)
def test_a_file_that_is_said_to_be_long_is_there(file: str) -> None:
    assert (ROOT / file).is_file()


def test_long_files_come_first_and_the_others_keep_their_order() -> None:
    names = ("tests/z.py::a", f"{LONGEST[1]}::a", "tests/b.py::a", f"{LONGEST[0]}::b[::]")
    items = [SimpleNamespace(nodeid=name) for name in names]
    longest_first(cast(list[pytest.Item], items))
    assert [item.nodeid for item in items] == [names[3], names[1], names[0], names[2]]
