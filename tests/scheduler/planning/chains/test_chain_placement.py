"""GBP-CR against Algorithm 1 in fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from catenary_scheduler.planning.chains import ChainTask, Server, gbp_cr
from catenary_scheduler.planning.chains.problem import exact
from catenary_scheduler.planning.chains.sizes import sizes_of
from catenary_services.errors import InvalidInput
from scheduling_cases.literal_chains import chain_tasks, decimals, literal_groups


def _task(memory: float, block: float, cache: float, blocks: int = 100) -> ChainTask:
    return ChainTask((Server("a", memory, 0.1, 0.1),), blocks, block, cache, 1.0)


@given(task=chain_tasks(), c=st.integers(1, 8))
def test_placement_equals_algorithm_1(task: ChainTask, c: int) -> None:
    placed = gbp_cr(task, c)
    groups, expected = literal_groups(task, c)
    assert [list(group) for group in placed.groups] == groups
    for number in range(len(task.servers)):
        first, blocks = expected.get(number, (1, 0))
        assert (placed.first_block[number] + 1, placed.blocks[number]) == (first, blocks)


@given(task=chain_tasks(), c=st.integers(1, 8))
def test_every_group_hosts_all_blocks_and_fits_with_c_caches(task: ChainTask, c: int) -> None:
    placed = gbp_cr(task, c)
    for group in placed.groups:
        hosted = set()
        for number in group:
            first = placed.first_block[number]
            hosted |= set(range(first, first + placed.blocks[number]))
            assert placed.slots[number] >= c * placed.blocks[number]
        assert hosted == set(range(task.blocks))


@given(
    memory=decimals(0, 400),
    block=decimals(1, 30),
    cache=decimals(1, 30, 2),
    c=st.integers(1, 40),
)
@example(memory=0.3, block=0.1, cache=0.1, c=2)
@example(memory=1.2, block=0.1, cache=0.1, c=3)  # 1.2 / 0.4 is 2.9999999999999996
def test_floors_are_exact(memory: float, block: float, cache: float, c: int) -> None:
    sizes = sizes_of(_task(memory, block, cache))
    each = exact(block) + exact(cache) * c
    blocks = int(sizes.max_blocks(c)[0])
    assert blocks == min(100, math.floor(exact(memory) / each))
    # The floor of a double with 1e-9 added is the same for decimals like these.
    assert blocks == min(100, math.floor(memory / (block + cache * c) + 1e-9))
    slots = math.floor((exact(memory) - exact(block) * blocks) / exact(cache)) if blocks else 0
    assert sizes.cache_slots(0, blocks) == slots


def test_memory_in_bytes_and_memory_beyond_64_bits_divide_alike() -> None:
    servers = tuple(Server(name, have, 0.1, 0.1) for name, have in (("a", 7 * 10**9), ("b", 3)))
    task = ChainTask(servers, 10, 10**9, 10**8, 1.0)
    huge = ChainTask(
        tuple(Server(s.name, exact(s.memory) * 10**20, 0.1, 0.1) for s in servers),
        10,
        10**29,
        10**28,
        1.0,
    )
    for c in range(1, 61):
        assert sizes_of(task).max_blocks(c).tolist() == sizes_of(huge).max_blocks(c).tolist()


def test_servers_without_room_are_skipped() -> None:
    servers = (Server("small", 1, 0.0, 0.1), Server("large", 10, 5.0, 0.1))
    placed = gbp_cr(ChainTask(servers, 4, 1, 0.5, 0.1), 1)
    assert placed.blocks == (0, 4)
    assert placed.groups == ((1,),)
    assert placed.group_service_s == (5.4,)


def test_stop_rule_leaves_servers_free_that_the_rate_does_not_need() -> None:
    servers = tuple(Server(str(number), 10, 0.5, 0.1) for number in range(4))
    task = ChainTask(servers, 5, 1, 0.2, 0.7, load=0.7, stop="rate")
    # A group has rate exactly 1/s, and exactly 0.7 / 0.7 is needed with one session each.
    assert gbp_cr(task, 1).blocks == (5, 0, 0, 0)
    assert gbp_cr(task, 1).groups_needed == 1
    more = gbp_cr(task.at_rate(Fraction(7, 10) + Fraction(1, 10**25)), 1)
    assert more.blocks == (5, 5, 0, 0)
    assert gbp_cr(ChainTask(servers, 5, 1, 0.2, 0.7), 1).blocks == (5, 5, 5, 5)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("blocks", {"blocks": 0}),
        ("block_memory", {"block_memory": 0}),
        ("cache_memory", {"cache_memory": -1.0}),
        ("cache_memory", {"cache_memory": 1e-20}),
        ("rate_per_s", {"rate_per_s": float("nan")}),
        ("load", {"load": 1}),
        ("stop", {"stop": "never"}),
        ("servers[1].name", {"servers": (Server("a", 1, 1, 1), Server("a", 1, 1, 1))}),
        ("servers[0].memory", {"servers": (Server("a", -1, 1, 1),)}),
        ("servers[0].communication_s", {"servers": (Server("a", 1, float("inf"), 1),)}),
        ("servers[0].block_s", {"servers": (Server("a", 1, 1, 0),)}),
        ("links[None, b]", {"links": {(None, "b"): 1.0}}),
        ("links[None, a]", {"links": {(None, "a"): -1.0}}),
    ],
)
def test_what_is_wrong_with_a_task_is_named(field: str, values: dict[str, object]) -> None:
    good = {
        "servers": (Server("a", 1, 1, 1),),
        "blocks": 1,
        "block_memory": 1,
        "cache_memory": 1,
        "rate_per_s": 1,
    }
    with pytest.raises(InvalidInput) as caught:
        ChainTask(**(good | values))  # type: ignore[arg-type]
    assert caught.value.field == field
