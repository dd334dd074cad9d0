"""PETALS and BPRR routing: shortest paths against brute force, slots in the order of arrival."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from catenary_lab.chains.bprr import BprrMetric
from catenary_lab.chains.expected_occupancy import ExpectedOccupancy
from catenary_lab.chains.path_dispatcher import PathDispatcher
from catenary_lab.chains.paths import (
    Occupancy,
    PathFinder,
    PathServer,
)
from catenary_lab.chains.petals import (
    FULL_NS,
    OVERHEAD_NS,
    PetalsMetric,
)
from catenary_scheduler.dispatch.events import (
    CloseSessions,
    Reject,
    RequestCancelled,
    RequestCompleted,
    SessionRequested,
    SessionsClosed,
    StartSession,
)
from catenary_services.domain.ids import AgentId, ModelKey, SessionId
from scheduling_cases.pipelines import request

MODEL = ModelKey("m", "1")


def server(name: str, first: int, last: int, slots: int = 100) -> PathServer:
    return PathServer(AgentId(name), first, last, slots)


def bprr(servers: list[PathServer], costs: list[int]) -> PathDispatcher:
    hosted = [each.last_block - each.first_block for each in servers]
    metric = BprrMetric([100] * len(servers), costs, hosted)
    blocks = max(each.last_block for each in servers)
    return PathDispatcher(MODEL, servers, blocks, metric)


def ask(dispatcher: PathDispatcher, number: int, now: int = 0) -> StartSession | None:
    commands = dispatcher.handle(SessionRequested(request(number), MODEL, 1, 1, 1 << 60), now)
    (command,) = commands or [None]
    assert command is None or isinstance(command, StartSession)
    return command


def finish(dispatcher: PathDispatcher, start: StartSession, now: int = 0) -> list[StartSession]:
    closing = dispatcher.handle(RequestCompleted(start.request), now)
    assert {each.agent for each in closing if isinstance(each, CloseSessions)} == {
        hop.agent for hop in start.hops
    }
    started = []
    for hop in start.hops:
        started += dispatcher.handle(SessionsClosed(hop.agent, (start.session,)), now)
    return [each for each in started if isinstance(each, StartSession)]


def servers_of(start: StartSession | None) -> list[str]:
    assert start is not None
    return [str(hop.agent) for hop in start.hops]


@pytest.mark.parametrize("seed", range(40))
def test_the_path_is_the_cheapest_of_all(seed: int) -> None:
    chance = random.Random(seed)
    blocks = 6
    servers = []
    for number in range(6):
        first = chance.randrange(blocks)
        last = chance.randint(first + 1, blocks)
        servers.append(server(str(number), first, last))
    rtts = [[chance.randrange(1, 10**8) for _ in range(7)] for _ in range(7)]
    tokens = [chance.randrange(1, 10**7) for _ in servers]
    metric = PetalsMetric(lambda here, there: rtts[here][there], tokens, sessions=1)
    occupancy = [Occupancy(100) for _ in servers]
    for state in occupancy:
        state.assigned = chance.randrange(2)

    def cost(path: tuple[int, ...]) -> int | None:
        at, before, total = 0, -1, 0
        for each in path:
            if not servers[each].first_block <= at < servers[each].last_block:
                return None
            total += rtts[before][each] // 2 + OVERHEAD_NS
            total += tokens[each] * (servers[each].last_block - at)
            total += FULL_NS * occupancy[each].assigned
            at, before = servers[each].last_block, each
        return total + rtts[before][-1] // 2 if at == blocks else None

    paths = [path for length in range(1, 7) for path in permutations(range(6), length)]
    known = [found for path in paths if (found := cost(path)) is not None]
    finder = PathFinder(servers, blocks, metric)
    shortest = finder.shortest(occupancy)
    if not known:
        assert shortest is None
    else:
        assert shortest is not None
        assert cost(shortest) == min(known)


def test_a_path_enters_a_server_where_the_one_before_ends() -> None:
    dispatcher = bprr([server("a", 0, 3), server("b", 1, 5)], [10, 10])
    start = ask(dispatcher, 1)
    assert start is not None
    assert [(hop.first_block, hop.last_block) for hop in start.hops] == [(0, 3), (3, 5)]
    assert [hop.blocks for hop in start.hops] == [3, 2]
    assert start.hops[1].partition.first_block == 1


def test_slots_are_granted_in_the_order_of_arrival() -> None:
    # Only one path; b has room for one session of two blocks, a for two sessions.
    dispatcher = bprr([server("a", 0, 2, slots=4), server("b", 2, 4, slots=2)], [10, 10])
    first = ask(dispatcher, 1)
    assert first is not None
    assert ask(dispatcher, 2) is None
    assert ask(dispatcher, 3) is None
    (second,) = finish(dispatcher, first)
    assert second.request == request(2)
    (third,) = finish(dispatcher, second)
    assert third.request == request(3)
    assert finish(dispatcher, third) == []


def test_who_waits_elsewhere_holds_its_slots_meanwhile() -> None:
    servers = [server("a", 0, 2, slots=2), server("b", 2, 4, slots=2), server("c", 2, 4, slots=2)]
    # b is cheaper for the first; the second is routed to c, as b has no slot, and waits for a.
    dispatcher = bprr(servers, [10, 10, 11])
    first = ask(dispatcher, 1)
    assert servers_of(first) == ["a", "b"]
    assert ask(dispatcher, 2) is None
    assert dispatcher.occupancy[2].held == 2
    assert first is not None
    (second,) = finish(dispatcher, first)
    assert servers_of(second) == ["a", "c"]


def test_petals_goes_round_a_server_that_runs_its_two_sessions() -> None:
    servers = [server("near", 0, 2), server("far", 0, 2)]
    metric = PetalsMetric(lambda here, there: 10 if 0 in (here, there) else 20, [1.0, 1.0], 2)
    dispatcher = PathDispatcher(MODEL, servers, 2, metric)
    taken = [servers_of(ask(dispatcher, number)) for number in range(4)]
    assert taken == [["near"], ["near"], ["far"], ["far"]]
    assert servers_of(ask(dispatcher, 4)) == ["near"]  # all are full: the fine is the same


def test_bprr_waits_where_it_is_shorter() -> None:
    servers = [server("fast", 0, 2, slots=2), server("slow", 0, 2, slots=4)]
    dispatcher = bprr(servers, [10, 75])
    assert servers_of(ask(dispatcher, 0)) == ["fast"]
    # fast: 100 + 2 * 10 and a wait of that over one session: 240. slow: 100 + 2 * 75 = 250.
    assert ask(dispatcher, 1) is None
    assert dispatcher.occupancy[0].assigned == 2


def test_a_path_needs_slots_for_the_blocks_it_processes() -> None:
    dispatcher = bprr([server("small", 0, 2, slots=1), server("large", 0, 2, slots=2)], [1, 99])
    assert servers_of(ask(dispatcher, 1)) == ["large"]
    alone = bprr([server("small", 0, 2, slots=1)], [1])
    (refused,) = alone.handle(SessionRequested(request(1), MODEL, 1, 1, 1), 0)
    assert isinstance(refused, Reject)


def test_a_request_that_is_cancelled_while_it_waits_frees_what_it_held() -> None:
    dispatcher = bprr([server("a", 0, 2, slots=4), server("b", 2, 4, slots=2)], [10, 10])
    first = ask(dispatcher, 1)
    assert first is not None
    assert ask(dispatcher, 2) is None
    assert ask(dispatcher, 3) is None
    assert dispatcher.handle(RequestCancelled(request(2)), 0) == []
    (third,) = finish(dispatcher, first)
    assert third.request == request(3)
    finish(dispatcher, third)
    assert [(each.free, each.held, each.running) for each in dispatcher.occupancy] == [
        (4, 0, 0),
        (2, 0, 0),
    ]


@pytest.mark.parametrize("seed", range(10))
def test_slots_are_never_overbooked_and_all_free_in_the_end(seed: int) -> None:
    chance = random.Random(seed)
    servers = [
        server("a", 0, 3, 7),
        server("b", 0, 2, 4),
        server("c", 2, 6, 9),
        server("d", 3, 6, 5),
    ]
    dispatcher = bprr(servers, [chance.randrange(1, 50) for _ in servers])
    running: dict[SessionId, StartSession] = {}
    waiting = set()
    for number in range(300):
        if running and chance.random() < 0.5:
            done = running.pop(chance.choice(list(running)))
            started = finish(dispatcher, done)
        else:
            waiting.add(request(number))
            started = [each for each in [ask(dispatcher, number)] if each is not None]
        for each in started:
            waiting.remove(each.request)
            running[each.session] = each
        for place in servers:
            used = sum(
                hop.blocks
                for start in running.values()
                for hop in start.hops
                if hop.agent == place.agent
            )
            assert used <= place.slots
    while running:
        for each in finish(dispatcher, running.pop(next(iter(running)))):
            waiting.remove(each.request)
            running[each.session] = each
    assert not waiting
    assert [state.free for state in dispatcher.occupancy] == [each.slots for each in servers]


def by_expected_ends(servers: list[PathServer], costs: list[int]) -> PathDispatcher:
    """BPRR whose router takes every session for over after 100 + its blocks at each server."""
    hosted = [each.last_block - each.first_block for each in servers]
    beliefs = ExpectedOccupancy(
        [each.slots for each in servers], lambda server, blocks: 100 + costs[server] * blocks
    )
    metric = BprrMetric([100] * len(servers), costs, hosted, beliefs.wait_ns)
    return PathDispatcher(MODEL, servers, max(hosted), metric, beliefs)


def test_a_wait_is_expected_until_the_session_of_mean_size_would_end() -> None:
    servers = [server("fast", 0, 2, slots=2), server("slow", 0, 2, slots=4)]
    dispatcher = by_expected_ends(servers, [10, 75])
    assert servers_of(ask(dispatcher, 0, now=0)) == ["fast"]  # is expected to end at 120
    # fast: 120 and a wait of 120 - now; slow: 100 + 2 * 75 = 250, without a wait.
    assert ask(dispatcher, 1, now=1) is None  # waits at fast for 119: 239
    assert servers_of(ask(dispatcher, 2, now=2)) == ["slow"]  # the one that waits comes first


def test_a_session_that_is_longer_than_expected_is_waited_for_all_the_same() -> None:
    servers = [server("fast", 0, 2, slots=2), server("slow", 0, 2, slots=4)]
    dispatcher = by_expected_ends(servers, [10, 75])
    first = ask(dispatcher, 0, now=0)
    assert servers_of(first) == ["fast"]
    # At 120 it is expected to be over; in truth it holds its slots, and the next one waits.
    assert ask(dispatcher, 1, now=120) is None
    assert dispatcher.occupancy[0].assigned == 2
    assert first is not None
    (second,) = finish(dispatcher, first, now=900)
    assert servers_of(second) == ["fast"]


def test_what_has_ended_early_is_still_counted() -> None:
    servers = [server("near", 0, 2), server("far", 0, 2)]
    beliefs = ExpectedOccupancy([100, 100], lambda server, blocks: 1000)
    metric = PetalsMetric(lambda here, there: 10 if 0 in (here, there) else 20, [1.0, 1.0], 1)
    dispatcher = PathDispatcher(MODEL, servers, 2, metric, beliefs)
    first = ask(dispatcher, 0, now=0)
    assert servers_of(first) == ["near"]
    assert first is not None
    finish(dispatcher, first, now=10)
    assert servers_of(ask(dispatcher, 1, now=20)) == ["far"]
    assert servers_of(ask(dispatcher, 2, now=1000)) == ["near"]
