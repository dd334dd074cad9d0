"""Units of batches of texts: what a batch counts as, and which of one size are the slowest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_services.domain.model import TokenUnits

UNITS = st.builds(
    TokenUnits, st.integers(2, 16).map(lambda eights: 8 * eights), st.integers(1, 600)
)


def test_a_batch_is_as_large_as_its_rows_filled_up_to_the_longest() -> None:
    units = TokenUnits(32, 256)
    assert units.per_text == 8
    assert units.of(1, 256) == 8
    assert units.of(3, 11) == 2
    assert (units.counted(1), units.counted(100), units.counted(300)) == (8, 100, 256)
    assert units.most_rows(2) == 8
    assert TokenUnits(16, 24).per_text == 2


@given(
    units=UNITS,
    size=st.integers(1, 64),
    data=st.data(),
    row=st.integers(0, 50),
    token=st.integers(0, 50),
    pair=st.integers(0, 3),
)
def test_no_batch_costs_more_than_the_slowest_extreme_of_its_size(
    units: TokenUnits, size: int, data: st.DataObject, row: int, token: int, pair: int
) -> None:
    def cost(rows: float, tokens: float) -> float:
        return rows * (row + token * tokens + pair * tokens * tokens)

    tokens = data.draw(st.integers(units.shortest, units.text_tokens))
    rows = size * units.tokens // tokens
    if rows == 0:  # not even one such text fits
        assert units.of(1, tokens) > size
        return
    assert units.of(rows, tokens) <= size
    assert rows <= units.most_rows(size)
    extremes = units.extremes(size)
    for few, long in extremes:
        assert units.shortest <= long <= units.text_tokens
        assert 1 <= few * long <= size * units.tokens
    # Lengths are whole numbers, so an extreme may be shorter by less than a token a row.
    most = max(cost(few, min(long + 1, units.text_tokens)) for few, long in extremes)
    assert cost(rows, tokens) <= most + 1e-6
