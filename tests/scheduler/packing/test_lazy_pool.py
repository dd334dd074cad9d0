"""Packing with few moves: when a session moves, and that the bound holds whatever happens."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from catenary_scheduler.packing.bound import bound_on_bins
from catenary_scheduler.packing.config import PackingConfig
from catenary_scheduler.packing.lazy.bin_forecast import BinForecast, LazyRules
from catenary_scheduler.packing.lazy.lazy_pool import LazyPool
from catenary_scheduler.packing.moves import PackingMove
from catenary_services.errors import InvalidInput
from scheduling_cases.packing_steps import depart, update


def pool_of(
    capacity: int,
    *bins: Iterable[tuple[int, int]],
    most_bins: int | None = None,
    rules: LazyRules | None = None,
) -> LazyPool:
    pool = LazyPool(capacity, most_bins=most_bins, rules=rules)
    for number, sessions in enumerate(bins):
        for item, size in sessions:
            pool.place(item, size, number)
    return pool


def test_crossing_the_border_of_a_class_moves_nobody() -> None:
    pool = pool_of(1000, [(1, 240), (2, 240), (3, 240)], [(4, 240), (5, 500), (6, 200)])
    for size in range(240, 500, 20):
        assert not update(pool, 1, size)
    assert not pool.check()


def test_only_an_overflow_moves_and_what_is_enough_opens_a_bin_if_no_other_has_room() -> None:
    pool = pool_of(1000, [(1, 300), (2, 300), (3, 390)], [(4, 600), (5, 200)], [(6, 900)])
    assert not update(pool, 1, 310)
    assert update(pool, 1, 320) == [PackingMove(2, 0, 3, 300)]
    assert not pool.check()


def test_the_move_after_which_both_bins_last_longest_is_made() -> None:
    sizes = {1: 100, 2: 400, 3: 495, 4: 300, 5: 200, 6: 600}
    pool = pool_of(
        1000, *[[(item, sizes[item]) for item in gpu] for gpu in ((1, 2, 3), (4, 5), (6,))]
    )
    result = pool.epoch((), {item: size + 5 for item, size in sizes.items()}, {})
    # Sessions grow by 5. Without 1 the bin lasts 9.5 epochs; 2 would fill bin 1 within 6; 3 fits
    # nowhere. On both others 1 lasts longer than that, and bin 1, with the least load, drains.
    assert result.moves == (PackingMove(1, 0, 2, 105),)


def test_a_bin_is_emptied_when_the_others_have_room_for_long() -> None:
    pool = pool_of(1000, [(1, 300), (2, 200)], [(3, 300), (4, 200)], [(5, 100), (6, 700)])
    moves = depart(pool, 6)
    assert moves == [PackingMove(5, 2, 0, 100)] or moves == [PackingMove(5, 2, 1, 100)]
    assert len(pool.bins()) == 2


def test_a_bin_is_not_emptied_where_growth_would_soon_undo_it() -> None:
    rules = LazyRules(headroom_share=0.5)
    pool = pool_of(1000, [(1, 300), (2, 400)], [(3, 100)], rules=rules)
    assert not pool.epoch((), {1: 340, 2: 440, 3: 140}, {}).moves
    assert len(pool.bins()) == 2
    calm = pool_of(1000, [(1, 340), (2, 440)], [(3, 140)], rules=rules)
    assert calm.epoch((), {}, {}).moves == (PackingMove(3, 1, 0, 140),)


def test_no_more_sessions_than_allowed_are_moved_to_empty_a_bin() -> None:
    crowds = [[(10 * gpu + number, 50 + 10 * gpu) for number in range(7)] for gpu in range(2)]
    pool = pool_of(1000, *crowds)
    assert not pool.epoch((), {}, {}).moves
    assert len(depart(pool, 0)) == 6
    assert len(pool.bins()) == 1


def test_arrivals_leave_the_bin_that_drains_alone() -> None:
    pool = pool_of(1000, [(1, 500), (2, 100)], [(3, 150), (4, 150), (5, 150)])
    pool.epoch((), {}, {6: 200})
    assert pool.bin_of(6) == 0
    assert pool.bin_for(900) is None
    assert pool.bin_for(500) == 1


def test_distance_makes_up_for_less_room() -> None:
    for near in (1, 2):
        config = PackingConfig(distance=lambda source, target, near=near: 1e15 * (target != near))
        pool = LazyPool(1000, config=config, rules=LazyRules(most_emptied=0))
        for item, size, number in ((1, 500, 0), (2, 490, 0), (3, 400, 1), (4, 420, 2), (5, 300, 3)):
            pool.place(item, size, number)
        (move,) = update(pool, 1, 520)
        assert move.target == near


def test_too_many_gpus_are_repaired_by_mells_rules() -> None:
    crowds = [[(10 * gpu + number, 12) for number in range(8)] for gpu in range(20)]
    pool = pool_of(1000, *crowds)
    assert any("promises" in each for each in pool.check())
    result = pool.epoch((), {}, {})
    assert pool.repairs == 1
    assert not pool.check()
    assert len(pool.bins()) <= bound_on_bins(2)
    for move in result.moves:
        assert pool.bin_of(move.item) == move.target != move.source
    assert not pool.epoch((), {}, {}).moves


def test_the_bound_is_four_thirds_and_three() -> None:
    assert [bound_on_bins(least) for least in (0, 1, 2, 3, 30)] == [3, 4, 5, 7, 43]


def test_who_finds_no_gpu_waits_and_nobody_overtakes() -> None:
    pool = LazyPool(1000, most_bins=1)
    assert pool.epoch((), {}, {1: 600, 2: 700, 3: 100}).queued == (2, 3)
    update(pool, 2, 750)
    result = pool.epoch([1], {}, {})
    assert result.placed == {2: 0, 3: 0}
    assert pool.size_of(2) == 750


def test_who_outgrows_a_full_cluster_waits_before_all_others() -> None:
    pool = LazyPool(1000, most_bins=1)
    pool.epoch((), {}, {1: 600, 2: 390, 3: 500})
    result = pool.epoch((), {1: 700}, {4: 20})
    assert (result.preempted, result.queued) == ((2,), (2, 3, 4))
    assert pool.epoch([3, 4], {1: 600}, {}).placed == {2: 0}


def test_wrong_input_changes_nothing() -> None:
    pool = pool_of(1000, [(1, 600)])
    for departed, sizes, arrived in (
        ([1], {}, {2: 1001}),
        ([], {2: 5}, {}),
        ([2], {}, {}),
        ([1, 1], {}, {}),
        ([], {}, {1: 5}),
        ([], {1: 0}, {}),
    ):
        with pytest.raises(InvalidInput):
            pool.epoch(departed, sizes, arrived)
    assert pool.bins() == {0: (1,)}
    with pytest.raises(InvalidInput):
        LazyPool(0)


def test_the_pace_of_growth_is_learned_from_whole_epochs() -> None:
    forecast = BinForecast(1000, LazyRules(headroom_share=1.0))
    assert forecast.headroom(10, 5.0) == 0
    forecast.learn(25, 10)
    assert forecast.headroom(4, 5.0) == pytest.approx(50)
    assert forecast.epochs_left(100, 4) == pytest.approx(10)
    forecast.learn(0, 10)
    assert forecast.epochs_left(100, 4) == pytest.approx(100 / 9)
    forecast.learn(-1000, 10)
    assert forecast.headroom(4, 5.0) == pytest.approx(2.5 * 0.81 * 20)


def test_headroom_is_never_more_than_a_share() -> None:
    forecast = BinForecast(1000, LazyRules())
    forecast.learn(1000, 10)
    assert forecast.headroom(8, 6.0) == 125
