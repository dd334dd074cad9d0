from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.packing.mell.sizes import (
    LARGE,
    MEDIUM,
    SMALL,
    TINY,
    blocks_of,
    is_minute,
    is_well_filled,
    kind_of,
)


@pytest.mark.parametrize(
    ("size", "capacity", "kind"),
    [
        (1200, 1200, LARGE),
        (601, 1200, LARGE),
        (600, 1200, MEDIUM),
        (401, 1200, MEDIUM),
        (400, 1200, SMALL),
        (301, 1200, SMALL),
        (300, 1200, TINY),
        (1, 1200, TINY),
        (334, 1000, MEDIUM),
        (333, 1000, SMALL),
        (251, 1000, SMALL),
        (250, 1000, TINY),
        (4, 7, LARGE),
        (3, 7, MEDIUM),
        (2, 7, SMALL),
        (1, 7, TINY),
    ],
)
def test_a_size_on_a_border_belongs_to_the_lower_class(size: int, capacity: int, kind: int) -> None:
    assert kind_of(size, capacity) == kind


@settings(max_examples=50)
@given(st.integers(1, 10**6), st.data())
def test_as_many_of_a_class_fit_a_gpu_as_its_name_says(capacity: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, capacity))
    most = capacity // size
    assert {LARGE: most == 1, MEDIUM: most == 2, SMALL: most == 3, TINY: most >= 4}[
        kind_of(size, capacity)
    ]
    assert is_minute(size, capacity) is (most >= 8)


def test_three_quarters_are_exact() -> None:
    assert is_well_filled(750, 1000)
    assert not is_well_filled(749, 1000)
    assert is_well_filled(6, 7)
    assert not is_well_filled(5, 7)


def test_a_begun_block_is_a_block() -> None:
    assert [blocks_of(tokens, 16) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
