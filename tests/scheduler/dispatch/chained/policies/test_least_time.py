"""Policy "least-time" at the dispatcher: which chain a request takes, with and without lines."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.chained.placement.chain_ranking import CANDIDATES
from catenary_scheduler.dispatch.chained.placement.least_time_placer import LeastTimePlacer
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    CloseSessions,
    Command,
    Event,
    LatencyRefitted,
    PlanActivated,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
    StartSession,
)
from catenary_scheduler.dispatch.placing.added_time import added_ns
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import Agent, CacheCapacity, Chain, ChainHop, ModelPlan, Plan

MS = 1_000_000
FAR = 1 << 60
MODEL = ModelKey("m", "1")
FAST = LatencyLines(0.1e6, 5e6, 500.0, 1e6, 10e6, 10.5e6)
TEN_TIMES = LatencyLines(1e6, 50e6, 5000.0, 10e6, 100e6, 105e6)


def whole(agent: str) -> tuple[ChainHop, ...]:
    """Returns the hops of a chain of one agent that holds all six blocks."""
    return (ChainHop(AgentId(agent), PartitionKey(MODEL, 0, 6), 0, 6),)


def chain(
    name: str, lines: LatencyLines | None, capacity: int = 32, service_ms: float = 1000
) -> Chain:
    """Returns a chain on the agent of that name."""
    return Chain(name, whole(name), capacity, round(service_ms * MS), lines=lines)


class Cluster:
    """A dispatcher with the policy, driven by hand; times are in nanoseconds."""

    def __init__(self, *chains: Chain, policy: str = "least-time", **slots: int) -> None:
        self.dispatcher = ChainedDispatcher(ChainedConfig(checked=True), policy=policy)
        self.now = 0
        self.count = 0
        self.chains = {each.chain_id: each for each in chains}
        self.started: dict[RequestId, StartSession] = {}
        for agent in sorted({hop.agent for each in chains for hop in each.hops}):
            self.tell(AgentJoined(Agent(agent, "x", ServerId(agent), 1, 1)))
        caches = tuple(
            CacheCapacity(hop.agent, hop.partition, slots[hop.agent])
            for hop in dict.fromkeys(hop for each in chains for hop in each.hops)
            if hop.agent in slots
        )
        served = ModelPlan(MODEL, FAR, (), chains=chains, caches=caches)
        self.tell(PlanActivated(Plan(PlanId("p"), (served,))))

    def tell(self, event: Event) -> list[Command]:
        commands = self.dispatcher.handle(event, self.now)
        for command in commands:
            if isinstance(command, StartSession):
                self.started[command.request] = command
            elif isinstance(command, CloseSessions):
                self.tell(SessionsClosed(command.agent, command.sessions))
        return commands

    def ask(
        self, prompt: int = 100, most: int = 200, objectives: TokenObjectives | None = None
    ) -> RequestId:
        self.count += 1
        request = RequestId(GatewayId("g"), self.count)
        asked = SessionRequested(
            request, MODEL, prompt, most, FAR, arrived_ns=self.now, objectives=objectives
        )
        self.tell(asked)
        return request

    def took(self, **asked: int) -> str:
        """Returns the chain that a request takes."""
        return self.started[self.ask(**asked)].chain_id

    def report(self, request: RequestId, tokens: int) -> None:
        """Tells that a session has so many tokens by now."""
        self.tell(SessionsProgressed((SessionProgress(request, tokens, 1, tokens * MS),)))

    def end(self, request: RequestId) -> None:
        self.tell(RequestCompleted(request))
        started = self.started.pop(request)
        for hop in started.hops:
            self.tell(SessionsClosed(hop.agent, (started.session,)))

    @property
    def placer(self) -> LeastTimePlacer:
        placer = self.dispatcher._table.model_queue(MODEL).placer
        assert isinstance(placer, LeastTimePlacer)
        return placer


def test_three_chats_on_two_idle_machines_use_both() -> None:
    for unlike in (1.0, 1.3):
        slower = LatencyLines(
            0.1e6 * unlike, 5e6 * unlike, 500.0, 1e6, 10e6 * unlike, 10.5e6 * unlike
        )
        cluster = Cluster(chain("a", FAST), chain("b", slower, service_ms=1000 * unlike))
        assert Counter(cluster.took() for _ in range(3)) == {"a": 2, "b": 1}


def test_the_policies_of_papers_put_them_all_on_the_fastest() -> None:
    """What the default is not: JFFC and "slo" fill the first chain before they use the other."""
    for policy in ("jffc", "slo"):
        chains = chain("a", FAST), chain("b", FAST, service_ms=1001)
        cluster = Cluster(*chains, policy=policy)
        assert [cluster.took() for _ in range(32)] == ["a"] * 32


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(1, 120), st.integers(1, 500), st.integers(1, 500))
def test_idle_equal_chains_are_used_evenly(
    chains: int, requests: int, prompt: int, most: int
) -> None:
    cluster = Cluster(*(chain(f"a{at}", FAST) for at in range(chains)))
    taken = Counter(
        cluster.took(prompt=prompt, most=most) for _ in range(min(requests, 3 * chains))
    )
    taken.update({f"a{at}": 0 for at in range(chains)})
    assert max(taken.values()) - min(taken.values()) <= 1


def test_a_chain_ten_times_slower_is_idle_while_the_fast_one_is_predicted_faster() -> None:
    cluster = Cluster(chain("slow", TEN_TIMES, 64), chain("fast", FAST, 64))
    slow, fast = cluster.placer.workers.open
    for _ in range(64):
        expected = (added_ns(slow, 100, 200.0), added_ns(fast, 100, 200.0))
        predicted = cluster.placer.requests.lengths.predict(100, 200)
        expected = (added_ns(slow, 100, predicted), added_ns(fast, 100, predicted))
        taken = cluster.took()
        assert taken == ("slow" if expected[0] < expected[1] else "fast")
        if taken == "slow":
            break
    assert len(fast.running_sequences) > 10
    assert len(slow.running_sequences) == 1


def test_a_full_chain_is_passed_over_and_taken_again_when_a_session_leaves() -> None:
    cluster = Cluster(chain("a", FAST, 2), chain("b", TEN_TIMES, 2))
    asked = [cluster.ask() for _ in range(5)]
    assert [cluster.started[each].chain_id for each in asked[:4]] == ["a", "a", "b", "b"]
    assert asked[4] not in cluster.started
    cluster.end(asked[1])
    assert cluster.started[asked[4]].chain_id == "a"


LINES = st.builds(
    LatencyLines,
    st.floats(1e4, 1e6),
    st.floats(1e5, 3e7),
    st.floats(0, 3e3),
    st.floats(1e4, 3e6),
    st.floats(1e6, 5e7),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(LINES, st.integers(1, 4)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_no_free_chain_would_have_been_predicted_better(
    kinds: list[tuple[LatencyLines, int]], draw: random.Random
) -> None:
    chains = [chain(f"a{at}", lines, capacity) for at, (lines, capacity) in enumerate(kinds)]
    cluster = Cluster(*chains)
    placer = cluster.placer
    running: list[RequestId] = []
    for _ in range(30):
        cluster.now += draw.randrange(100 * MS)
        if running and draw.random() < 0.3:
            cluster.end(running.pop(draw.randrange(len(running))))
        elif running and draw.random() < 0.4:
            cluster.report(draw.choice(running), draw.randrange(1, 300))
        prompt, most = draw.randrange(1, 800), draw.randrange(1, 500)
        answer = placer.requests.lengths.predict(prompt, most)
        routes, workers = placer.workers.routes, placer.workers.open
        free = {
            route.chain_id: added_ns(worker, prompt, answer)
            for route, worker in zip(routes, workers, strict=True)
            if route.running < route.capacity
        }
        waits = cluster.dispatcher.queued(MODEL)
        request = cluster.ask(prompt, most)
        if free and not waits:
            chosen = cluster.started[request].chain_id
            assert free[chosen] == min(free.values())
            running.append(request)
        else:
            assert request not in cluster.started
        running += [each for each in cluster.started if each not in running]


def test_sessions_of_other_chains_on_the_same_device_count_there() -> None:
    first, second = (PartitionKey(MODEL, 0, 5), 0, 5), (PartitionKey(MODEL, 5, 6), 5, 6)

    def pair(name: str, one: str, other: str) -> Chain:
        hops = (ChainHop(AgentId(one), *first), ChainHop(AgentId(other), *second))
        return Chain(name, hops, 8, 10**9, lines=FAST)

    # x runs five of six blocks for two chains, of which one has its place before the third chain.
    cluster = Cluster(pair("x-a", "x", "a"), pair("x-b", "x", "b"), pair("y-c", "y", "c"))
    taken = [cluster.took(), cluster.took()]
    assert taken == ["x-a", "y-c"]  # although no session is on x-b
    taken += [cluster.took() for _ in range(4)]
    # Counted chain by chain, x would have twice as many sessions as y.
    assert Counter(each[0] for each in taken) == {"x": 3, "y": 3}


def test_without_lines_the_fastest_free_chain_is_taken_as_by_jffc() -> None:
    for seed in range(20):
        taken: dict[str, list[tuple[int, str]]] = {}
        for policy in ("jffc", "least-time"):
            draw = random.Random(seed)
            pace = draw.sample(range(100, 2000), 6)
            chains = [
                chain(f"a{at}", None, draw.randint(1, 3), service)
                for at, service in enumerate(pace)
            ]
            cluster = Cluster(*chains, policy=policy)
            began = taken[policy] = []
            for _ in range(60):
                if cluster.started and draw.random() < 0.45:
                    cluster.end(draw.choice(sorted(cluster.started, key=lambda each: each.number)))
                else:
                    cluster.ask(draw.randrange(1, 500), draw.randrange(1, 500))
                began += [
                    (each.number, command.chain_id) for each, command in cluster.started.items()
                ]
        assert taken["jffc"] == taken["least-time"]


def test_equally_fast_chains_without_lines_are_used_evenly() -> None:
    cluster = Cluster(chain("a", None), chain("b", None), chain("c", None, service_ms=1001))
    assert [cluster.took() for _ in range(4)] == ["a", "b", "a", "b"]


def test_one_chain_without_lines_has_all_be_judged_by_their_service_times() -> None:
    cluster = Cluster(chain("a", None), chain("b", FAST, service_ms=1001))
    assert [cluster.took() for _ in range(4)] == ["a"] * 4
    fitted = ((whole("a"), FAST),)
    cluster.tell(LatencyRefitted(MODEL, fitted))
    assert [cluster.took() for _ in range(4)] == ["b"] * 4


def test_new_lines_change_the_choice() -> None:
    cluster = Cluster(chain("a", FAST), chain("b", FAST))
    slower = replace(FAST, decode_ns=3 * FAST.decode_ns, decode_lone_ns=3 * FAST.decode_lone_ns)
    cluster.tell(LatencyRefitted(MODEL, ((whole("a"), slower),)))
    assert cluster.took() == "b"


def test_prompts_that_wait_make_a_chain_later() -> None:
    cluster = Cluster(chain("a", FAST), chain("b", FAST))
    assert cluster.took(prompt=2000, most=10) == "a"
    assert cluster.took(prompt=100, most=10) == "b"
    # Two short prompts on b delay less than the long one that is still being run on a.
    assert cluster.took(prompt=100, most=10) == "b"


def test_what_is_left_of_the_others_counts_and_not_only_their_number() -> None:
    cluster = Cluster(chain("a", FAST), chain("b", FAST))
    first, second = cluster.ask(most=400), cluster.ask(most=400)
    cluster.report(first, 2)
    cluster.report(second, 250)
    assert cluster.started[first].chain_id == "a"
    assert cluster.took(most=400) == "b"


@pytest.mark.parametrize("objective", [TokenObjectives(0, 40 * MS), TokenObjectives(2000 * MS, 0)])
def test_with_objectives_the_least_added_time_decides_among_chains_that_keep_them(
    objective: TokenObjectives,
) -> None:
    cluster = Cluster(chain("slow", TEN_TIMES, 64), chain("fast", FAST, 64))
    taken = [cluster.started[cluster.ask(objectives=objective)].chain_id for _ in range(3)]
    # "slo" takes the idle one, though its steps are ten times as long, where the objective allows.
    assert taken == ["fast"] * 3


def test_among_many_chains_the_best_of_those_at_the_head_is_taken() -> None:
    many = 4 * CANDIDATES
    draw = random.Random(5)
    chains = [
        chain(f"a{at}", replace(FAST, decode_ns=1e6 * draw.randint(5, 100), decode_lone_ns=0.0), 4)
        for at in range(many)
    ]
    cluster = Cluster(*chains)
    placer = cluster.placer
    lost = total = 0.0
    running: list[RequestId] = []
    for _ in range(400):
        prompt, most = draw.randrange(20, 400), draw.randrange(20, 400)
        answer = placer.requests.lengths.predict(prompt, most)
        routes, workers = placer.workers.routes, placer.workers.open
        free = {
            route.chain_id: added_ns(worker, prompt, answer)
            for route, worker in zip(routes, workers, strict=True)
            if route.running < route.capacity
        }
        request = cluster.ask(prompt, most)
        running.append(request)
        best = min(free.values())
        lost += free[cluster.started[request].chain_id] - best
        total += best
        if len(running) > 2 * many:
            cluster.end(running.pop(draw.randrange(len(running))))
    assert lost < 0.02 * total


def test_no_chain_is_forgotten_while_slots_of_a_shared_cache_are_short() -> None:
    first = (PartitionKey(MODEL, 0, 3), 0, 3)
    second = (PartitionKey(MODEL, 3, 6), 3, 6)
    chains = [
        Chain(
            f"x-{other}",
            (ChainHop(AgentId("x"), *first), ChainHop(AgentId(other), *second)),
            2,
            10**9,
            lines=FAST,
        )
        for other in ("a", "b")
    ]
    cluster = Cluster(*chains, x=6, a=6, b=6)  # x has slots for two sessions, of four planned
    asked = [cluster.ask() for _ in range(4)]
    assert [each in cluster.started for each in asked] == [True, True, False, False]
    cluster.end(asked[0])
    assert asked[2] in cluster.started
    cluster.end(asked[1])
    assert asked[3] in cluster.started
