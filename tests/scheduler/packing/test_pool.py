"""Mell's rules one by one, where the golden sequences do not show them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from catenary_scheduler.packing.config import PackingConfig
from catenary_scheduler.packing.mell.pool import MellPool
from catenary_scheduler.packing.moves import PackingMove
from catenary_services.errors import InvalidInput
from scheduling_cases.packing_steps import allocate, depart, update


def pool_of(
    capacity: int, *bins: Iterable[tuple[int, int]], most_bins: int | None = None
) -> MellPool:
    """Returns a pool with (session, size) on bins 0, 1, ..."""
    pool = MellPool(capacity, most_bins=most_bins)
    for number, sessions in enumerate(bins):
        for item, size in sessions:
            pool.place(item, size, number)
    return pool


def partition(pool: MellPool) -> set[frozenset[object]]:
    return {frozenset(items) for items in pool.bins().values()}


def sets(*groups: Iterable[int]) -> set[frozenset[object]]:
    return {frozenset(group) for group in groups}


def test_a_move_says_who_went_where_with_what() -> None:
    pool = pool_of(1000, [(1, 300), (2, 300), (3, 300)], [(4, 310)])
    assert depart(pool, 1) == [PackingMove(4, 1, 0, 310)]
    assert (pool.bin_of(4), pool.size_of(4), pool.item_moves) == (0, 310, 1)


def test_a_session_larger_than_a_gpu_is_refused_and_changes_nothing() -> None:
    pool = pool_of(1000, [(1, 600)])
    with pytest.raises(InvalidInput, match="a session of 1001 does not fit a GPU of 1000"):
        pool.epoch([1], {}, {2: 1001})
    with pytest.raises(InvalidInput, match="a session of 0 does not fit"):
        update(pool, 1, 0)
    with pytest.raises(InvalidInput, match="session 2 is not known"):
        update(pool, 2, 10)
    with pytest.raises(InvalidInput, match="session 2 is not known"):
        depart(pool, 2)
    with pytest.raises(InvalidInput, match="session 1 is known already"):
        allocate(pool, 1, 10)
    with pytest.raises(InvalidInput, match="departs twice"):
        pool.epoch([1, 1], {}, {})
    assert pool.bins() == {0: (1,)}


def test_a_tiny_request_goes_to_the_gpu_with_the_fewest_requests() -> None:
    pool = pool_of(1000, [(1, 510), (2, 150), (3, 150)], [(4, 760)])
    assert not allocate(pool, 5, 130)
    assert pool.bin_of(5) == 1


def test_distance_decides_between_gpus_that_are_otherwise_as_good() -> None:
    for near in (1, 2):
        config = PackingConfig(distance=lambda source, target, near=near: float(target != near))
        pool = MellPool(1000, config=config)
        for item, size, number in ((1, 700, 0), (9, 200, 0), (2, 700, 1), (3, 700, 2)):
            pool.place(item, size, number)
        assert [move.target for move in update(pool, 1, 850)] == [near]


def test_growth_of_a_tiny_request_evicts_the_smallest_that_suffices() -> None:
    pool = pool_of(1000, [(1, 250), (2, 240), (3, 230), (4, 220)])
    assert [move.item for move in pool.epoch((), {2: 250, 4: 240, 3: 250, 1: 250}, {}).moves] == []
    pool = pool_of(1000, [(1, 250), (2, 220), (3, 200), (4, 150), (5, 150)])
    assert [move.item for move in update(pool, 1, 250)] == []
    assert [move.item for move in update(pool, 3, 250)] == [4]
    assert not pool.check()


def test_one_tiny_request_that_suffices_leaves_rather_than_several() -> None:
    pool = pool_of(1000, [(1, 600), (2, 130), (3, 140), (4, 130)])
    assert [move.item for move in update(pool, 1, 735)] == [3]


def test_an_l_that_outgrows_its_partner_takes_a_smaller_one() -> None:
    pool = pool_of(1000, [(1, 600), (2, 390)], [(3, 320), (4, 320), (5, 320)])
    moves = update(pool, 1, 650)
    assert partition(pool) in (
        sets([1, 3], [2], [4, 5]),
        sets([1, 4], [2], [3, 5]),
        sets([1, 5], [2], [3, 4]),
    )
    assert len(moves) == 2


def test_tiny_requests_without_their_m_are_merged_away() -> None:
    """Completion G10: the M goes, and what is left is no second T-GPU below 75 %."""
    pool = pool_of(1000, [(1, 240), (2, 240)], [(3, 490), (4, 240)])
    depart(pool, 3)
    assert partition(pool) == sets([1, 2, 4])


def test_a_group_counts_as_one_and_its_requests_move_together() -> None:
    pool = pool_of(1000, [(1, 600)], [(2, 390), (3, 390)])
    for item in range(10, 13):
        allocate(pool, item, 60)
    assert len({pool.bin_of(item) for item in range(10, 13)}) == 1
    away = pool.bin_of(10)
    moves = update(pool, 1, 1000) if away == 0 else pool.epoch((), {2: 500, 3: 500}, {}).moves
    assert {move.item for move in moves} >= {10, 11, 12}
    assert pool.item_moves <= 2
    assert not pool.check()


def test_a_member_that_outgrows_its_group_stays_where_it_is() -> None:
    pool = MellPool(1000)
    for item in range(4):
        allocate(pool, item, 50)
    assert not update(pool, 0, 200)
    assert len(pool.bins()) == 1
    assert not pool.check()


def test_a_group_that_outgrows_a_quarter_is_split_in_place() -> None:
    pool = MellPool(1000)
    for item in range(5):
        allocate(pool, item, 45)
    assert not pool.epoch((), dict.fromkeys(range(5), 60), {}).moves
    assert not pool.check()


def test_what_is_left_of_two_groups_is_merged() -> None:
    pool = pool_of(1000, [(1, 760), (2, 120), (3, 100)], [(4, 760), (5, 120), (6, 100)])
    assert not pool.check()
    moves = pool.epoch([2, 5], {}, {}).moves
    assert len(moves) == 1
    assert pool.bin_of(3) == pool.bin_of(6)


def test_of_a_tiny_gpu_where_one_has_grown_to_small_that_one_moves() -> None:
    pool = pool_of(1000, [(1, 240), (2, 240), (3, 250), (4, 240)])
    assert [move.item for move in pool.epoch((), {3: 251}, {}).moves] == [3]


def test_batched_arrivals_fill_the_holes_that_departures_left() -> None:
    pool = pool_of(
        1000,
        [(1, 300), (2, 300), (3, 300)],
        [(4, 300), (5, 300), (6, 300)],
        [(7, 400), (8, 400)],
        [(9, 600), (10, 390)],
    )
    result = pool.epoch([1, 5, 7, 10], {}, {11: 310, 12: 320, 13: 410, 14: 380})
    assert not result.moves
    assert len(pool.bins()) == 4
    assert result.placed.keys() == {11, 12, 13, 14}
    assert all(pool.bin_of(item) == gpu for item, gpu in result.placed.items())


def test_who_finds_no_gpu_waits_and_nobody_overtakes() -> None:
    pool = MellPool(1000, most_bins=1)
    assert pool.epoch((), {}, {1: 600, 2: 700, 3: 100}).queued == (2, 3)
    assert pool.bins() == {0: (1,)}
    update(pool, 2, 750)
    result = pool.epoch([1], {}, {})
    assert result.placed == {2: 0, 3: 0}
    assert pool.size_of(2) == 750
    assert not result.queued


def test_a_waiting_session_may_leave() -> None:
    pool = MellPool(1000, most_bins=1)
    pool.epoch((), {}, {1: 600, 2: 700, 3: 300})
    assert pool.epoch([2], {}, {}).placed == {3: 0}


def test_who_outgrows_a_full_cluster_waits_before_all_others() -> None:
    pool = MellPool(1000, most_bins=1)
    pool.epoch((), {}, {1: 600, 2: 390, 3: 500})
    result = pool.epoch((), {1: 700}, {4: 20})
    assert result.preempted == (2,)
    assert result.queued == (2, 3, 4)
    assert pool.bin_of(2) is None


def test_what_was_placed_by_others_is_repaired_by_the_next_epoch() -> None:
    pool = pool_of(1000, *[[(number, 150)] for number in range(12)])
    assert pool.check()
    result = pool.epoch((), {}, {})
    assert not pool.check()
    assert sorted(len(items) for items in pool.bins().values()) == [2, 5, 5]
    assert len(result.moves) == 9


def test_an_overflow_made_by_others_is_repaired_too() -> None:
    pool = pool_of(1000, [(1, 600), (2, 600), (3, 300), (4, 300), (5, 90), (6, 90), (7, 80)])
    pool.epoch((), {}, {})
    assert not pool.check()
    pool.place(3, 310, 5)
    assert (pool.bin_of(3), pool.size_of(3)) == (5, 310)
    pool.place(5, 50, 5)
    pool.epoch((), {}, {})
    assert not pool.check()


def test_a_gpu_name_is_used_again_when_it_is_free() -> None:
    pool = MellPool(1000)
    for item in range(3):
        allocate(pool, item, 900)
    depart(pool, 1)
    allocate(pool, 9, 900)
    assert pool.bin_of(9) == 1
    assert set(pool.bins()) == {0, 1, 2}


def test_sizes_may_shrink() -> None:
    pool = pool_of(1000, [(1, 600), (2, 390)], [(3, 300), (4, 300), (5, 300)])
    pool.epoch((), {1: 100, 3: 60, 4: 120}, {})
    assert not pool.check()
    assert pool.size_of(3) == 60
