"""What each policy chooses, and JFFC against a twin that scans every chain."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.book import Cache, SlotClaims
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.queues.wait_queue import CentralQueue
from catenary_scheduler.dispatch.events import (
    AgentLost,
    PlanActivated,
    SessionRequested,
    StartSession,
)
from catenary_scheduler.dispatch.placing.prefix_directory import (
    NOTHING,
    CachedTokens,
)
from catenary_services.domain.ids import AgentId, PartitionKey
from catenary_services.domain.plan import Chain
from scheduling_cases.chain_bench import LLAMA, MS, ChainBench, chain, hop, plan, started

THREE = plan(chain("a", 2, 50), chain("b", 4, 100), chain("c", 1, 90))


def chosen(bench: ChainBench) -> str:
    """Has a request arrive and returns the chain it was bound to, started or not."""
    before = {key: route.jobs for key, route in routes(bench).items()}
    bench.ask(0)
    (found,) = [key for key, route in routes(bench).items() if route.jobs > before[key]]
    return found


def routes(bench: ChainBench) -> dict[str, ChainState]:
    model_queue = bench.dispatcher._table.model_queues[LLAMA]
    return {route.chain_id: route for route in model_queue._routes.values()}


class Draws:
    """A generator that returns what it is told, and remembers what it was asked."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)
        self.asked: list[int] = []

    def __call__(self, below: int) -> int:
        self.asked.append(below)
        return self.values.pop(0)


def test_jsq_takes_the_shortest_queue_per_slot_and_settles_ties_at_random() -> None:
    draws = Draws(2, 0, 1, 0, 0, 0, 0, 0, 0)
    bench = ChainBench(THREE, policy="jsq", random_below=draws)
    # (Z - c + 1)+ / c is 0 for all that are not full; then 1/2 for a, 1/4 and 2/4 for b, 1 for c.
    assert [chosen(bench) for _ in range(9)] == ["c", "a", "b", "a", "b", "b", "b", "b", "a"]
    assert draws.asked == [3, 2, 2, 2, 1, 1, 1, 1, 2]


def test_sa_jsq_settles_ties_by_speed() -> None:
    bench = ChainBench(THREE, policy="sa-jsq", random_below=lambda n: 0)
    assert [chosen(bench) for _ in range(9)] == ["a", "a", "c", "b", "b", "b", "b", "b", "a"]


def test_jiq_takes_any_free_chain_and_any_at_all_if_none_is() -> None:
    draws = Draws(1, 2, 0, 0, 0, 0, 0, 2)
    bench = ChainBench(THREE, policy="jiq", random_below=draws)
    assert [chosen(bench) for _ in range(8)] == ["b", "c", "a", "a", "b", "b", "b", "c"]
    assert draws.asked == [3, 3, 2, 2, 1, 1, 1, 3]


def test_sed_weighs_the_queue_against_the_speed() -> None:
    bench = ChainBench(THREE, policy="sed", random_below=lambda n: 0)
    # a: 50, then 50 (1 + 1/2) = 75 and 100; c: 90, then 180; b: 100.
    assert [chosen(bench) for _ in range(5)] == ["a", "a", "a", "c", "a"]


def test_a_request_waits_at_its_own_chain_although_another_is_free() -> None:
    bench = ChainBench(
        plan(chain("a", 1, 10), chain("b", 1, 90)), policy="sed", random_below=lambda n: 0
    )
    first = bench.start(0)
    assert bench.ask(1) == bench.ask(2) == []
    assert started(bench.end(3, first)) == [(2, "a")]


def test_who_waits_at_a_chain_that_goes_away_is_bound_anew() -> None:
    bench = ChainBench(
        plan(chain("a", 1, 10), chain("b", 1, 90)), policy="sed", random_below=lambda n: 0
    )
    bench.start(0)
    bench.ask(1)
    commands = bench.tell(2, AgentLost(AgentId("a")))
    # The one that lost its session is ahead; the other waits behind it.
    assert started(commands) == [(1, "b")]
    assert routes(bench)["b"].jobs == 2


class FreeAgents:
    """A policy with routes of its own: any single agent that hosts the whole model."""

    central = True

    def __init__(self, caches: list[Cache]) -> None:
        self._caches = caches

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        pass

    def offer(self, route: ChainState) -> None:
        pass

    def freed(self, cache: Cache) -> None:
        pass

    def choose(
        self, request: SessionRequested, tokens: int = 0, cached: CachedTokens = NOTHING
    ) -> ChainState | None:
        for cache in self._caches:
            if cache.capacity - cache.used >= 6:
                hops = (hop(cache.agent, 0, 6),)
                return ChainState(f"on {cache.agent}", hops, SlotClaims((cache,), (6,)), 1, MS)
        return None


def test_a_policy_may_return_routes_that_are_no_chains() -> None:
    caches: list[Cache] = []
    bench = ChainBench(None, policy=lambda _: CentralQueue(FreeAgents(caches)))
    whole = PartitionKey(LLAMA, 0, 6)
    caches += [bench.book.slots.cache(AgentId(agent), whole) for agent in "ab"]
    bench.tell(0, PlanActivated(plan(chain("a", 0, 1), chain("b", 0, 1), a=12, b=6)))
    found = [bench.ask(0) for _ in range(4)]
    assert [started(each) for each in found] == [[(1, "on a")], [(2, "on a")], [(3, "on b")], []]
    (session,) = found[1]
    assert isinstance(session, StartSession)
    assert started(bench.end(1, session)) == [(4, "on a")]


# ---- the twin ----


class Twin:
    """JFFC by its definition: a list of chains, a list of waiting requests, and slots by agent."""

    def __init__(self) -> None:
        self.chains: tuple[Chain, ...] = ()
        self.limits: dict[tuple[str, PartitionKey], int] = {}
        self.used: dict[tuple[str, PartitionKey], int] = {}
        self.running: list[tuple[int, Chain]] = []
        self.waiting: list[tuple[int, int]] = []

    def activate(self, chains: tuple[Chain, ...], slots: dict[str, int]) -> list[tuple[int, str]]:
        self.chains = chains
        self.limits = {}
        for each in chains:
            for at in each.hops:
                key = (at.agent, at.partition)
                asked = at.blocks * each.capacity
                self.limits[key] = slots.get(at.agent, self.limits.get(key, 0) + asked)
        return self.serve()

    def arrive(self, request: int, priority: int) -> list[tuple[int, str]]:
        self.waiting.append((-priority, request))
        self.waiting.sort()
        return self.serve()

    def end(self, request: int) -> list[tuple[int, str]]:
        """Its agents say so one after the other, and each time somebody may start."""
        (mine,) = [entry for entry in self.running if entry[0] == request]
        found = []
        for at in reversed(mine[1].hops):
            self.used[at.agent, at.partition] -= at.blocks
            if at is mine[1].hops[0]:
                self.running.remove(mine)
            found += self.serve()
        return found

    def is_free(self, candidate: Chain) -> bool:
        on_it = sum(1 for _, other in self.running if other.hops == candidate.hops)
        return on_it < candidate.capacity and all(
            self.used.get((at.agent, at.partition), 0) + at.blocks
            <= self.limits[at.agent, at.partition]
            for at in candidate.hops
        )

    def serve(self) -> list[tuple[int, str]]:
        found = []
        while self.waiting:
            free = [each for each in self.chains if self.is_free(each)]
            if not free:
                break
            fastest = min(free, key=lambda each: each.service_ns)
            _, request = self.waiting.pop(0)
            self.running.append((request, fastest))
            for at in fastest.hops:
                key = (at.agent, at.partition)
                self.used[key] = self.used.get(key, 0) + at.blocks
            found.append((request, fastest.chain_id))
        return found


WAYS = (
    (hop("a", 0, 6),),
    (hop("b", 0, 6),),
    (hop("c", 0, 3), hop("d", 3, 6)),
    (hop("c", 0, 3), hop("e", 2, 6, entry=3)),
    (hop("f", 0, 2), hop("e", 2, 6)),
    (hop("f", 0, 2), hop("b", 0, 6, entry=2)),
)

plans = st.tuples(
    st.lists(
        st.tuples(st.sampled_from(WAYS), st.integers(0, 3), st.sampled_from([10, 20, 20, 35])),
        max_size=6,
        unique_by=lambda each: each[0],
    ),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 12), max_size=2),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from([0, 0, 1])),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("plan"), plans),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(first=plans, then=steps)
def test_jffc_decides_as_a_scan_of_all_chains_does(first: object, then: list[object]) -> None:
    bench, twin = ChainBench(None), Twin()
    sessions: dict[int, StartSession] = {}
    requests = 0
    for kind, argument in [("plan", first), *then]:
        if kind == "plan":
            ways, slots = argument
            chains = tuple(chain(f"k{i}", c, ms, *way) for i, (way, c, ms) in enumerate(ways))
            expected = twin.activate(chains, slots)
            commands = bench.tell(0, PlanActivated(plan(*chains, **slots)))
        elif kind == "arrive":
            requests += 1
            expected = twin.arrive(requests, argument)
            commands = bench.ask(0, priority=argument)
        elif twin.running:
            request = twin.running[argument % len(twin.running)][0]
            expected = twin.end(request)
            commands = bench.end(0, sessions[request])
        else:
            continue
        sessions |= {c.request.number: c for c in commands if isinstance(c, StartSession)}
        assert started(commands) == expected
        assert bench.figure("queued_requests") == len(twin.waiting)
