"""Rows stay contiguous, grouped by entry block, and every move carries the right cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_agent.decoders.cache.cache_rows import CacheRows, cover

ENTRIES = (0, 3, 4, 7)
BLOCKS = 9


class Mirror:
    """Caches as lists of session numbers, changed only by the moves."""

    def __init__(self) -> None:
        self.rows = CacheRows()
        self.caches: list[dict[int, int]] = [{} for _ in range(BLOCKS)]
        self.open: dict[int, int] = {}

    def add(self, session: int, entry: int) -> None:
        self._carry_out(self.rows.add(session, entry))
        for block in range(entry, BLOCKS):
            self.caches[block][self.rows.row_of[session]] = session
        self.open[session] = entry

    def remove(self, session: int) -> None:
        moves = self.rows.remove(session)
        del self.open[session]
        assert len(moves) <= len(ENTRIES)
        self._carry_out(moves)

    def check(self) -> None:
        assert self.rows.row_of.keys() == self.open.keys()
        for block in range(BLOCKS):
            there = [session for session, entry in self.open.items() if entry <= block]
            count = self.rows.through(block)
            assert count == len(there)
            assert sorted(self.caches[block][row] for row in range(count)) == sorted(there)
        for session, entry in self.open.items():
            row = self.rows.row_of[session]
            assert all(self.caches[b][row] == session for b in range(entry, BLOCKS))

    def _carry_out(self, moves: list) -> None:  # type: ignore[type-arg]
        for move in moves:
            for block in range(move.entry_block, BLOCKS):
                self.caches[block][move.target] = self.caches[block][move.source]


@given(
    st.lists(st.tuples(st.sampled_from([*ENTRIES, None, None]), st.integers(0, 30)), max_size=60)
)
def test_any_joining_and_leaving_keeps_every_session_s_cache(
    steps: list[tuple[int | None, int]],
) -> None:
    mirror = Mirror()
    for number, (entry, choice) in enumerate(steps):
        if entry is not None:
            mirror.add(number, entry)
        elif mirror.open:
            mirror.remove(sorted(mirror.open)[choice % len(mirror.open)])
        mirror.check()


def test_with_one_entry_a_leaving_session_costs_one_move() -> None:
    rows = CacheRows()
    for session in range(5):
        assert rows.add(session, 0) == []
    (move,) = rows.remove(1)
    assert (move.source, move.target) == (4, 1)
    assert rows.remove(3) == []


def test_holes_are_computed_only_where_that_is_cheaper() -> None:
    rows = [0, 1, 3, 8, 9]
    assert cover(rows, 0, frozenset()) == [(0, 2), (3, 4), (8, 10)]
    assert cover(rows, 1, frozenset()) == [(0, 4), (8, 10)]
    assert cover(rows, 4, frozenset()) == [(0, 10)]


def test_a_full_session_is_never_computed_along() -> None:
    assert cover([0, 2, 4], 5, frozenset({1})) == [(0, 1), (2, 5)]
    assert cover([], 5, frozenset()) == []
