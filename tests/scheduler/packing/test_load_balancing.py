"""Even load: which sessions move, and when it is even enough."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_lab.packing.load_balancing import LoadBalancing
from catenary_scheduler.packing.load_balancing import balancing_moves
from catenary_scheduler.packing.moves import Item, PackingMove

CAPACITY = 100
GPUS = st.dictionaries(
    st.integers(0, 6),
    st.lists(st.integers(1, 40), max_size=6),
    min_size=1,
    max_size=6,
)


def named(gpus: dict[int, list[int]]) -> dict[int, dict[Item, int]]:
    return {
        gpu: {(gpu, number): size for number, size in enumerate(sizes)}
        for gpu, sizes in gpus.items()
    }


def loads_of(items: dict[int, dict[Item, int]]) -> dict[int, int]:
    return {gpu: sum(sizes.values()) for gpu, sizes in items.items()}


def twin(items: dict[int, dict[Item, int]], threshold: int) -> list[PackingMove]:
    """The rule by trying every session of the fullest GPU."""
    items = {gpu: dict(sizes) for gpu, sizes in items.items()}
    moves: list[PackingMove] = []
    while True:
        ordered = sorted(loads_of(items).items(), key=lambda each: (-each[1], each[0]))
        fullest, most = ordered[0]
        emptiest, least = min(ordered, key=lambda each: (each[1], each[0]))
        options = [
            (abs(most - least - 2 * size), -size, number, item)
            for number, (item, size) in enumerate(items[fullest].items())
            if size < most - least
        ]
        if most - least <= threshold or not options:
            return moves
        item = min(options, key=lambda each: each[:3])[3]
        size = items[fullest].pop(item)
        items[emptiest][item] = size
        moves.append(PackingMove(item, fullest, emptiest, size))


@settings(max_examples=40, deadline=None)
@given(GPUS, st.integers(0, 30))
def test_moves_are_those_of_the_twin(gpus: dict[int, list[int]], threshold: int) -> None:
    items = named(gpus)
    assert balancing_moves(loads_of(items), items, threshold) == twin(items, threshold)


@settings(max_examples=40, deadline=None)
@given(GPUS, st.integers(0, 30))
def test_every_move_makes_loads_more_even(gpus: dict[int, list[int]], threshold: int) -> None:
    items = named(gpus)
    load = loads_of(items)
    for move in balancing_moves(load, items, threshold):
        before = load[move.source] - load[move.target]
        assert before > threshold
        load[move.source] -= move.size
        load[move.target] += move.size
        assert abs(load[move.source] - load[move.target]) < before


def test_what_may_not_move_counts_and_stays() -> None:
    moves = balancing_moves({0: 80, 1: 10}, {0: {"small": 10}}, 20)
    assert moves == [PackingMove("small", 0, 1, 10)]
    assert balancing_moves({0: 80, 1: 10}, {}, 20) == []


def test_an_empty_gpu_takes_part() -> None:
    items: dict[int, dict[Item, int]] = {0: {"a": 30, "b": 30}}
    assert balancing_moves({0: 60, 1: 0}, items, 10) == [PackingMove("a", 0, 1, 30)]


def test_there_are_no_more_moves_than_allowed() -> None:
    items: dict[int, dict[Item, int]] = {0: dict.fromkeys(range(8), 10)}
    assert len(balancing_moves({0: 80, 1: 0}, items, 0)) == 4
    assert len(balancing_moves({0: 80, 1: 0}, items, 0, most_moves=2)) == 2


def test_an_overflow_moves_the_smallest_that_suffices() -> None:
    policy = LoadBalancing(100, threshold=100)
    policy.epoch((), {}, {"a": 50, "b": 30, "c": 20})
    result = policy.epoch((), {"a": 75}, {})
    assert result.moves == (PackingMove("b", 0, 1, 30),)
    assert result.preempted == ()


def test_an_overflow_preempts_only_where_no_gpu_has_room() -> None:
    policy = LoadBalancing(100, most_bins=1)
    policy.epoch((), {}, {"a": 50, "b": 40})
    result = policy.epoch((), {"a": 70}, {})
    assert (result.preempted, result.queued) == (("b",), ("b",))


def test_who_has_just_come_does_not_migrate() -> None:
    policy = LoadBalancing(100, threshold=10)
    policy.epoch((), {}, {"a": 60, "b": 35})
    result = policy.epoch((), {}, {"c": 20})  # opens a GPU, and that one is too empty then
    assert result.placed == {"c": 1}
    assert [move.item for move in result.moves] == ["b"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 60), max_size=4), min_size=1, max_size=15), st.data())
def test_loads_are_even_and_nothing_is_lost(rounds: list[list[int]], data: st.DataObject) -> None:
    policy = LoadBalancing(CAPACITY)
    sizes: dict[Item, int] = {}
    for number, fresh in enumerate(rounds):
        departed = [item for item in sizes if data.draw(st.booleans())]
        where = {item: policy.bin_of(item) for item in sizes}
        for item in departed:
            del sizes[item]
        grown = {item: min(CAPACITY, size + 5) for item, size in sizes.items()}
        arrived: dict[Item, int] = {(number, index): size for index, size in enumerate(fresh)}
        sizes = {**grown, **arrived}
        result = policy.epoch(departed, grown, arrived)
        for move in result.moves:
            assert (where[move.item], policy.bin_of(move.item)) == (move.source, move.target)
        still = {item for item in grown if where[item] == policy.bin_of(item)}
        assert still == grown.keys() - {move.item for move in result.moves}
        there = {item for items in policy.bins().values() for item in items}
        assert there == sizes.keys()
        items = {gpu: {item: sizes[item] for item in each} for gpu, each in policy.bins().items()}
        loads = loads_of(items)
        assert all(0 < load <= CAPACITY for load in loads.values())
        assert not loads or balancing_moves(loads, items, CAPACITY // 10) == []
