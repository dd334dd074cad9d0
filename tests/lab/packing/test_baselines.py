"""Best fit and worst fit beside twins that look at everything, and what becomes of overflows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_lab.packing.baselines import Baseline, BestFit, WorstFit
from catenary_scheduler.packing.moves import Item
from catenary_scheduler.packing.policies import PackingPolicy
from catenary_services.errors import InvalidInput

CAPACITY = 12


@dataclass
class Twin:
    """The rules by walking over lists; sessions are numbered in the order of their arrival."""

    best: bool
    most: int
    bins: dict[int, dict[int, int]] = field(default_factory=dict)
    queue: list[tuple[int, int]] = field(default_factory=list)

    def epoch(self, departed: set[int], sizes: dict[int, int], arrived: dict[int, int]) -> None:
        self.queue = [(item, sizes.get(item, size)) for item, size in self.queue]
        self.queue = [each for each in self.queue if each[0] not in departed]
        for items in self.bins.values():
            for item in list(items):
                if item in departed:
                    del items[item]
                elif item in sizes:
                    items[item] = sizes[item]
        victims = []
        for items in self.bins.values():
            while sum(items.values()) > CAPACITY:
                youngest = max(items)
                victims.append((youngest, items.pop(youngest)))
        self.close()
        self.queue = sorted(victims) + self.queue + list(arrived.items())
        while self.queue and self.put(*self.queue[0]):
            self.queue.pop(0)
        self.close()

    def put(self, item: int, size: int) -> bool:
        loads = {gpu: sum(items.values()) for gpu, items in self.bins.items()}
        roomy = [gpu for gpu, load in loads.items() if load + size <= CAPACITY]
        if roomy:
            sign = -1 if self.best else 1
            # Equally full: best fit takes the last, worst fit the first.
            gpu = min(roomy, key=lambda gpu: (sign * loads[gpu], sign * gpu))
        elif len(self.bins) < self.most:
            gpu = next(name for name in range(self.most) if name not in self.bins)
            self.bins[gpu] = {}
        else:
            return False
        self.bins[gpu][item] = size
        return True

    def close(self) -> None:
        self.bins = {gpu: items for gpu, items in self.bins.items() if items}


@pytest.mark.parametrize(("policy", "best"), [(BestFit, True), (WorstFit, False)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_epoch_ends_as_the_twin_says(
    policy: type[Baseline], best: bool, data: st.DataObject
) -> None:
    most = data.draw(st.integers(1, 5))
    fast: PackingPolicy = policy(CAPACITY, most_bins=most)
    twin = Twin(best, most)
    sizes: dict[int, int] = {}
    names = 0
    for _ in range(data.draw(st.integers(1, 12))):
        departed = {item for item in sizes if data.draw(st.integers(0, 4)) == 0}
        grown = {
            item: min(CAPACITY, size + data.draw(st.integers(0, 3)))
            for item, size in sizes.items()
            if item not in departed
        }
        fresh = data.draw(st.lists(st.integers(1, CAPACITY), max_size=4))
        arrived = dict(enumerate(fresh, names))
        names += len(fresh)
        sizes = {**grown, **arrived}
        told: tuple[dict[Item, int], dict[Item, int]] = (dict(grown.items()), dict(arrived.items()))
        result = fast.epoch(sorted(departed), *told)
        twin.epoch(departed, grown, arrived)
        assert {gpu: set(items) for gpu, items in fast.bins().items()} == {
            gpu: set(items) for gpu, items in twin.bins.items()
        }
        assert list(result.queued) == [item for item, _ in twin.queue]
        assert not result.moves
        for item, gpu in result.placed.items():
            assert fast.bin_of(item) == gpu
            assert fast.size_of(item) == told[1].get(item, told[0].get(item))


def test_the_youngest_of_an_overflowing_gpu_is_dispatched_again() -> None:
    policy = BestFit(10)
    policy.epoch((), {}, {"old": 4, "young": 4})
    result = policy.epoch((), {"old": 7}, {})
    assert result.preempted == ("young",)
    assert result.placed == {"young": 1}
    assert policy.bin_of("old") == 0


def test_an_idle_gpu_ends_before_arrivals_are_placed() -> None:
    policy = WorstFit(10)
    policy.epoch((), {}, {"long": 8, "short": 8})
    assert len(policy.bins()) == 2
    policy.epoch(("short",), {}, {"new": 2})
    assert policy.bins() == {0: ("long", "new")}


def test_nobody_overtakes_in_the_queue() -> None:
    policy = WorstFit(10, most_bins=1)
    policy.epoch((), {}, {"first": 6})
    assert policy.epoch((), {}, {"large": 6, "small": 1}).queued == ("large", "small")
    result = policy.epoch(("first",), {}, {})
    assert list(result.placed) == ["large", "small"]
    assert result.queued == ()


def test_who_gives_up_waiting_is_forgotten() -> None:
    policy = BestFit(10, most_bins=1)
    policy.epoch((), {}, {"runs": 6, "waits": 6})
    assert policy.epoch(("waits",), {}, {}).queued == ()
    assert policy.bin_of("waits") is None


def test_a_preempted_session_waits_before_all_others() -> None:
    policy = BestFit(10, most_bins=1)
    policy.epoch((), {}, {"old": 5, "young": 5, "waits": 5})
    result = policy.epoch((), {"old": 6}, {})
    assert result.queued == ("young", "waits")
    assert result.placed == {}


def test_adopted_sessions_count_where_they_are() -> None:
    policy = WorstFit(10)
    policy.place("a", 3, 4)
    policy.place("b", 6, 2)
    assert policy.epoch((), {}, {"new": 2}).placed == {"new": 4}
    policy.place("b", 6, 0)
    assert policy.bins() == {0: ("b",), 4: ("a", "new")}
    policy.epoch((), {}, {})
    assert _members(policy) == {0: {"b"}, 4: {"a", "new"}}


@pytest.mark.parametrize(
    ("departed", "sizes", "arrived", "field"),
    [
        (("none",), {}, {}, "departed"),
        (("a", "a"), {}, {}, "departed"),
        ((), {"none": 3}, {}, "sizes"),
        ((), {"a": 11}, {}, "sizes"),
        ((), {}, {"a": 3}, "arrived"),
        ((), {}, {"b": 0}, "arrived"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    departed: tuple[Item, ...], sizes: dict[Item, int], arrived: dict[Item, int], field: str
) -> None:
    policy = BestFit(10)
    policy.epoch((), {}, {"a": 4})
    with pytest.raises(InvalidInput) as caught:
        policy.epoch(departed, sizes, arrived)
    assert caught.value.field == field
    assert (policy.bins(), policy.size_of("a")) == ({0: ("a",)}, 4)


def test_a_gpu_without_room_is_refused() -> None:
    with pytest.raises(InvalidInput, match="capacity"):
        WorstFit(0)


def _members(policy: PackingPolicy) -> dict[int, set[Item]]:
    return {gpu: set(items) for gpu, items in policy.bins().items()}
