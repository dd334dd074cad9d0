"""What must hold after every operation, whatever came before (Theorems 1-3)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.packing.packing_operations import CAPACITIES, fewest_bins, many_lives
from catenary_scheduler.packing.lazy.lazy_pool import LazyPool
from catenary_scheduler.packing.lower_bound import lower_bound
from catenary_scheduler.packing.mell.pool import MellPool
from scheduling_cases.packing_steps import allocate, depart

Maker = Callable[[int], MellPool | LazyPool]
SIZES = st.one_of(
    st.floats(0, 1),
    st.floats(0, 0.26),
    st.floats(0, 0.126),
    st.sampled_from([1 / 8, 1 / 4, 1 / 3, 1 / 2, 1.0]),
)
"""Shares of a GPU."""


class Life(RuleBasedStateMachine):
    """Sessions of one pool; the classes below say of which."""

    make: Maker
    most_items = 10

    @initialize(capacity=st.sampled_from(CAPACITIES))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.pool = type(self).make(capacity)
        self.sizes: dict[int, int] = {}
        self.born = 0
        self.last_moves = 0

    def size(self, share: float) -> int:
        return max(1, min(self.capacity, round(share * self.capacity)))

    def chosen(self, number: int) -> int:
        return sorted(self.sizes)[number % len(self.sizes)]

    def epoch(self, departed: list[int], grown: dict[int, int], arrived: dict[int, int]) -> None:
        before = {item: self.pool.bin_of(item) for item in self.sizes}
        result = self.pool.epoch(departed, dict(grown), dict(arrived))
        for item in departed:
            del self.sizes[item]
        self.sizes.update(grown)
        self.sizes.update(arrived)
        moved = {move.item: (move.source, move.target) for move in result.moves}
        for item, source in before.items():
            if item in self.sizes:
                target = self.pool.bin_of(item)
                assert moved.pop(item, (source, source)) == (source, target)
        assert not moved
        assert set(result.placed) == set(arrived)
        pool = self.pool
        self.last_moves = pool.item_moves if isinstance(pool, MellPool) else len(result.moves)
        if len(departed) + len(grown) + len(arrived) <= 1:
            assert self.last_moves <= self.most_items

    @rule(share=SIZES)
    def allocate(self, share: float) -> None:
        self.born += 1
        self.epoch([], {}, {self.born: self.size(share)})

    @precondition(lambda self: self.sizes)
    @rule(number=st.integers(0, 99))
    def depart(self, number: int) -> None:
        self.epoch([self.chosen(number)], {}, {})

    @precondition(lambda self: self.sizes)
    @rule(number=st.integers(0, 99), share=SIZES, anew=st.booleans())
    def update(self, number: int, share: float, anew: bool) -> None:
        item = self.chosen(number)
        size = self.size(share if anew else self.sizes[item] / self.capacity + share / 4)
        self.epoch([], {item: size}, {})

    @rule(
        departures=st.lists(st.integers(0, 99), max_size=4),
        growth=st.floats(0, 0.1),
        shares=st.lists(SIZES, max_size=6),
    )
    def batch(self, departures: list[int], growth: float, shares: list[float]) -> None:
        departed = sorted({self.chosen(number) for number in departures if self.sizes})
        grown = {
            item: self.size(size / self.capacity + growth)
            for item, size in self.sizes.items()
            if item not in departed and item % 2
        }
        arrived = {self.born + 1 + at: self.size(share) for at, share in enumerate(shares)}
        self.born += len(shares)
        self.epoch(departed, grown, arrived)

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert not self.pool.check()
        on_bins = [item for items in self.pool.bins().values() for item in items]
        assert sorted(on_bins, key=str) == sorted(self.sizes, key=str)
        assert all(self.pool.size_of(item) == size for item, size in self.sizes.items())
        least = lower_bound(self.sizes.values(), self.capacity)
        assert 3 * (len(self.pool.bins()) - 3) <= 4 * least


class MellLife(Life):
    make = staticmethod(MellPool)


class LazyLife(Life):
    make = staticmethod(LazyPool)


_SETTINGS = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestMell = MellLife.TestCase
TestMell.settings = _SETTINGS
TestLazy = LazyLife.TestCase
TestLazy.settings = _SETTINGS


@pytest.mark.parametrize("make", [MellPool, LazyPool])
@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 24), max_size=9))
def test_beside_an_exact_packing_the_bound_holds(make: Maker, sizes: list[int]) -> None:
    pool = make(24)
    for item, size in enumerate(sizes):
        allocate(pool, item, size)
    exact = fewest_bins(sizes, 24)
    assert lower_bound(sizes, 24) <= exact <= len(pool.bins())
    assert 3 * (len(pool.bins()) - 3) <= 4 * exact


def test_the_exact_twin_is_exact() -> None:
    assert fewest_bins([], 10) == 0
    assert fewest_bins([6, 6, 6], 10) == 3
    assert fewest_bins([5, 5, 5, 5], 10) == 2
    assert fewest_bins([7, 6, 4, 3, 5, 5], 10) == 3
    assert fewest_bins([4, 4, 4, 3, 3, 3, 3, 3, 3], 10) == 3


@pytest.mark.parametrize("make", [MellPool, LazyPool])
@pytest.mark.parametrize("batched", [False, True])
def test_random_lives_keep_everything(make: Maker, batched: bool) -> None:
    tally = many_lives(make, 1_000, batch=8 if batched else 1, seed=100)
    assert tally.violations == []
    assert tally.operations >= 1_000
    assert batched or tally.most_moves <= 10


@pytest.mark.parametrize("make", [MellPool, LazyPool])
@pytest.mark.parametrize("most_bins", [1, 3, 6])
def test_a_finite_cluster_keeps_to_its_limit_and_serves_in_order(
    make: Callable[..., MellPool | LazyPool], most_bins: int
) -> None:
    rng = random.Random(most_bins)
    pool = make(1000, most_bins=most_bins)
    sizes: dict[int, int] = {}
    arrived: dict[int, int] = {}
    for number in range(400):
        known = sorted(sizes)
        departed = rng.sample(known, min(len(known), rng.randint(0, 2)))
        grown = {
            item: min(1000, sizes[item] + rng.randint(0, 60))
            for item in known
            if item not in departed
        }
        arrived = {number * 10 + at: rng.randint(1, 700) for at in range(rng.randint(0, 2))}
        queued = pool.queued()
        result = pool.epoch(departed, dict(grown), dict(arrived))
        for item in departed:
            del sizes[item]
        sizes.update(grown)
        sizes.update(arrived)
        assert not pool.check(), number
        assert len(pool.bins()) <= most_bins
        waiting = set(pool.queued())
        assert all((pool.bin_of(item) is None) == (item in waiting) for item in sizes)
        assert tuple(result.queued) == pool.queued()
        stayed = [item for item in queued if item in waiting and item not in result.preempted]
        seated = [item for item in queued if item in result.placed]
        if stayed and seated:
            assert queued.index(seated[-1]) < queued.index(stayed[0])
    for item in sorted(sizes):
        depart(pool, item)
    assert not pool.queued()
    assert not pool.bins()


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [MellPool, LazyPool])
def test_a_hundred_thousand_operations_break_nothing(make: Maker) -> None:
    """With figures: `pytest -m system -s`; `python -m benchmarks packing` prints them too."""
    for batch in (1, 8):
        tally = many_lives(make, 100_000, batch=batch, seed=50_000)
        print(
            f"{make.__name__}, up to {batch} at once: {tally.operations} operations, "
            f"{len(tally.violations)} violations, GPUs at most {tally.excess:.2f} beyond 4/3 of "
            f"the lower bound, at most {tally.most_moves} items moved at once"
        )
        assert tally.violations == []
        assert tally.operations >= 100_000
        assert tally.excess <= 3
        if batch == 1:
            assert tally.most_moves <= 10
