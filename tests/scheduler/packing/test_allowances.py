"""What moves take is made up for at the rate it is given, however large they are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.packing.transfers.epoch_budgets import EpochBudgets

EPOCH = 1000


def test_an_epochs_worth_may_be_taken_at_once() -> None:
    given_out: EpochBudgets[str] = EpochBudgets(EPOCH)
    assert given_out.room("link", 50, 0) == 50
    given_out.take("link", 20, 50, 0)
    assert given_out.room("link", 50, 0) == 30
    assert given_out.room("other", 50, 0) == 50
    assert given_out.room("link", 50, EPOCH // 5) == 40
    assert given_out.room("link", 50, EPOCH) == 50


def test_what_is_too_large_for_an_epoch_passes_and_is_made_up_for() -> None:
    given_out: EpochBudgets[str] = EpochBudgets(EPOCH)
    assert given_out.room("link", 50, 0, largest=180) == 180
    given_out.take("link", 180, 50, 0)
    assert given_out.room("link", 50, EPOCH, largest=180) == 0
    assert given_out.room("link", 50, 3 * EPOCH, largest=180) == 20
    assert given_out.room("link", 50, 4 * EPOCH, largest=180) == 180


def test_nothing_passes_where_nothing_is_given() -> None:
    given_out: EpochBudgets[str] = EpochBudgets(EPOCH)
    assert given_out.room("link", 0, 0, largest=180) == 0


def test_only_what_is_owed_is_remembered() -> None:
    given_out: EpochBudgets[int] = EpochBudgets(EPOCH)
    for key in range(100):
        given_out.take(key, 10, 50, 0)
        given_out.take(-key - 1, 0, 50, 0)
    assert len(given_out) == 100
    assert all(given_out.room(key, 50, EPOCH) == 50 for key in range(100))
    assert len(given_out) == 0


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(1, 200)), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_in_the_long_run_no_more_passes_than_is_given(steps: list[tuple[int, int]]) -> None:
    given_out: EpochBudgets[str] = EpochBudgets(EPOCH)
    per_epoch, now, taken, largest = 50, 0, 0, 0
    for wait, size in steps:
        now += wait
        if size <= given_out.room("link", per_epoch, now, largest=size):
            given_out.take("link", size, per_epoch, now)
            taken += size
            largest = max(largest, size)
        # one epoch's worth, or one session, ahead of what was given until now
        assert taken <= per_epoch * now / EPOCH + max(per_epoch, largest) + 1e-6
