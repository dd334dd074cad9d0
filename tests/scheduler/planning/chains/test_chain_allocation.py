"""GCA against Algorithm 2 over server pairs, and its paths against exhaustive search."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings

from catenary_scheduler.planning.chains import ChainTask, HostedBlocks, Server, compose, gca
from catenary_services.errors import InvalidInput
from scheduling_cases.literal_chains import (
    LiteralAllocation,
    as_literal,
    literal_chains,
    placed_tasks,
)

Placed = tuple[ChainTask, tuple[HostedBlocks, ...]]


@settings(max_examples=150, deadline=None)
@given(placed=placed_tasks())
def test_chains_equal_algorithm_2(placed: Placed) -> None:
    _agrees(*placed)


@settings(max_examples=150, deadline=None)
@given(placed=placed_tasks(linked=True))
def test_linked_chains_equal_algorithm_2_with_link_times(placed: Placed) -> None:
    _agrees(*placed)


def _agrees(task: ChainTask, hosted: tuple[HostedBlocks, ...]) -> None:
    chains, expected = gca(task, hosted), literal_chains(task, hosted)
    assert [as_literal(task, chain) for chain in chains] == [
        (chain.servers, chain.blocks, chain.capacity) for chain in expected
    ]
    assert [chain.service_s for chain in chains] == pytest.approx(
        [float(chain.service_s) for chain in expected], rel=1e-12
    )
    rate = sum(chain.capacity / chain.service_s for chain in expected)
    assert sum(c.capacity * c.rate_per_s for c in chains) == pytest.approx(float(rate), rel=1e-12)


@given(placed=placed_tasks())
def test_first_chain_is_the_fastest_of_all_paths(placed: Placed) -> None:
    task, hosted = placed
    twin = LiteralAllocation(task, hosted)
    links = {
        (before, after): cost
        for (before, after), cost in twin.links().items()
        if after == -2 or twin.left[after] >= twin.processed(before, after)
    }
    paths = list(twin.paths(links))
    chains = gca(task, hosted)
    assert bool(chains) == bool(paths)
    if chains:
        assert chains[0].service_s == pytest.approx(float(min(paths)[0]), rel=1e-12)


@given(placed=placed_tasks())
def test_chains_never_take_more_slots_than_there_are_and_leave_no_path(placed: Placed) -> None:
    task, hosted = placed
    left = {item.server: item.slots for item in hosted}
    for chain in gca(task, hosted):
        assert chain.capacity > 0
        assert [hop.first_block for hop in chain.hops[1:]] == [
            h.last_block for h in chain.hops[:-1]
        ]
        assert (chain.hops[0].first_block, chain.hops[-1].last_block) == (0, task.blocks)
        for hop in chain.hops:
            left[hop.server] -= chain.capacity * hop.blocks
    assert min(left.values(), default=0) >= 0
    rest = [HostedBlocks(i.server, i.first_block, i.blocks, left[i.server]) for i in hosted]
    assert gca(task, rest) == ()


@given(placed=placed_tasks())
def test_links_that_do_not_depend_on_the_server_before_change_nothing(placed: Placed) -> None:
    task, hosted = placed
    names = [None, *(server.name for server in task.servers)]
    links = {
        (before, server.name): float(server.communication_s)
        for server in task.servers
        for before in names
        if before != server.name
    }
    linked = ChainTask(
        task.servers,
        task.blocks,
        task.block_memory,
        task.cache_memory,
        task.rate_per_s,
        links=links,
    )
    plain = gca(task, hosted)
    same = gca(linked, hosted)
    assert [(c.hops, c.capacity) for c in same] == [(c.hops, c.capacity) for c in plain]
    assert [c.service_s for c in same] == pytest.approx([c.service_s for c in plain])


def test_peer_to_peer_times_choose_neighbours() -> None:
    servers = tuple(Server(name, 10, 0.5, 0.1) for name in ("a1", "a2", "b1", "b2"))
    hosted = [
        HostedBlocks(name, 0 if name[1] == "1" else 2, 2, 4) for name in ("a1", "a2", "b1", "b2")
    ]
    near = {(f"{site}1", f"{site}2"): 0.01 for site in "ab"}
    far = {("a1", "b2"): 0.9, ("b1", "a2"): 0.9}
    ends = {(None, f"{site}1"): 0.2 for site in "ab"} | {(f"{s}2", None): 0.3 for s in "ab"}
    task = ChainTask(servers, 4, 1, 1, 1.0, links=near | far | ends)
    chains = gca(task, hosted)
    assert [[hop.server for hop in chain.hops] for chain in chains] == [["a1", "a2"], ["b1", "b2"]]
    assert [chain.capacity for chain in chains] == [2, 2]
    assert chains[0].service_s == pytest.approx(0.2 + 0.01 + 0.3 + 4 * 0.1)


def test_a_pair_that_is_not_connected_is_no_link() -> None:
    servers = (Server("a", 10, 0.5, 0.1), Server("b", 10, 0.5, 0.1))
    hosted = [HostedBlocks("a", 0, 1, 5), HostedBlocks("b", 1, 1, 5)]
    assert gca(ChainTask(servers, 2, 1, 1, 1.0, links={(None, "a"): 0.1}), hosted) == ()


def test_many_servers_agree_with_link_times_over_pairs() -> None:
    chance = random.Random(5)
    servers = tuple(
        Server(
            str(n),
            chance.choice((20, 40)),
            round(chance.uniform(0.1, 2), 3),
            chance.choice((0.1, 0.2)),
        )
        for n in range(60)
    )
    task = ChainTask(servers, 40, 1.32, 0.11, 1.0)
    placed = compose(task, 7)
    links = {
        (before, server.name): float(server.communication_s)
        for server in servers
        for before in [None, *(other.name for other in servers)]
        if before != server.name
    }
    linked = ChainTask(servers, 40, 1.32, 0.11, 1.0, links=links)
    again = gca(linked, placed.hosted)
    assert len(again) > 15
    assert [(c.hops, c.capacity) for c in again] == [(c.hops, c.capacity) for c in placed.chains]
    assert math.isclose(placed.total_rate_per_s, sum(c.capacity * c.rate_per_s for c in again))


def test_links_too_long_for_64_bits_are_refused() -> None:
    task = ChainTask((Server("a", 10, 0.5, 0.1),), 2, 1, 1, 1.0, links={(None, "a"): 1e12})
    with pytest.raises(InvalidInput, match="links"):
        compose(task, 1)


@pytest.mark.parametrize(
    ("field", "hosted"),
    [
        ("hosted[0].server", [HostedBlocks("x", 0, 1, 1)]),
        ("hosted[1].server", [HostedBlocks("a", 0, 1, 1), HostedBlocks("a", 1, 1, 1)]),
        ("hosted[0].blocks", [HostedBlocks("a", 1, 2, 1)]),
        ("hosted[0].blocks", [HostedBlocks("a", 1, 0, 1)]),
        ("hosted[0].slots", [HostedBlocks("a", 0, 1, -1)]),
    ],
)
def test_a_placement_that_does_not_fit_is_named(field: str, hosted: list[HostedBlocks]) -> None:
    task = ChainTask((Server("a", 10, 0.5, 0.1),), 2, 1, 1, 1.0)
    with pytest.raises(InvalidInput) as caught:
        gca(task, hosted)
    assert caught.value.field == field
