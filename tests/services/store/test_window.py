"""The window of a peer, and the limit of bytes a second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_services.store.window import MOST_PIECES, TARGET_NS, ByteRate, FetchWindow

BASE_NS = 5_000_000


def settled(queue_ns: int, answers: int = 4000) -> FetchWindow:
    """Returns the window after answers that spent so long in queues, and one that did not."""
    window = FetchWindow()
    window.answered(BASE_NS, 0)
    for number in range(answers):
        window.answered(BASE_NS + queue_ns, number * 1_000_000)
    return window


@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**12)), max_size=60))
def test_a_window_stays_between_one_piece_and_the_most(answers: list[tuple[int, int]]) -> None:
    window = FetchWindow()
    for took_ns, now_ns in sorted(answers, key=lambda each: each[1]):
        window.answered(took_ns, now_ns)
        assert 1 <= window.pieces <= MOST_PIECES
        if took_ns % 7 == 0:
            window.lost()
            assert 1 <= window.pieces <= MOST_PIECES


def test_a_window_opens_where_nothing_queues() -> None:
    assert settled(0).pieces == MOST_PIECES


def test_a_window_closes_where_others_fill_the_queue() -> None:
    window = settled(0)
    for number in range(400):
        window.answered(BASE_NS + 3 * TARGET_NS, 10**9 + number)
    assert window.pieces == 1


def test_a_window_settles_where_its_own_queue_is_as_long_as_the_target() -> None:
    window, link_ns = FetchWindow(), 8_000_000  # a piece takes 8 ms on this link
    window.answered(BASE_NS + link_ns, 0)
    for number in range(3000):
        window.answered(BASE_NS + window.pieces * link_ns, number * 1_000_000)
    queued_ns = (window.pieces - 1) * link_ns
    assert abs(queued_ns - TARGET_NS) <= 2 * link_ns


def test_a_longer_way_becomes_the_new_base_after_minutes() -> None:
    window = settled(0)
    for number in range(1200):
        window.answered(BASE_NS + 3 * TARGET_NS, number * 1_000_000_000)
    assert window.pieces > 10


@given(
    st.integers(1, 10**9),
    st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(0, 10**8)), min_size=1, max_size=50),
)
def test_no_more_than_the_rate_passes_in_any_stretch(
    rate: int, pieces: list[tuple[int, int]]
) -> None:
    limit, now, passed = ByteRate(rate), 0, []
    for nbytes, pause_ns in pieces:
        now += pause_ns
        passed.append((now + limit.wait_ns(nbytes, now), nbytes))
    for first, (begin, _) in enumerate(passed):
        # What passes behind the first piece of a stretch waits for all before it.
        for last in range(first + 1, len(passed)):
            between = sum(nbytes for _, nbytes in passed[first:last])
            spent = passed[last][0] - begin
            assert between <= rate * spent / 1e9 + (last - first) * rate / 1e9 + 1


def test_without_a_limit_nothing_waits() -> None:
    assert ByteRate(0).wait_ns(1 << 30, 5) == 0
