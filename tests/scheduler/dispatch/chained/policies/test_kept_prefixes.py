"""Turns of conversations go where their history is, unless load says otherwise."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    CloseSessions,
    Command,
    Event,
    PlanActivated,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
    StartSession,
)
from catenary_scheduler.dispatch.placing.prefix_directory import PrefixDirectory
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
from catenary_services.domain.plan import Agent, Chain, ChainHop, ModelPlan, Plan
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS

MS = 1_000_000
FAR = 1 << 60
MODEL = ModelKey("m", "1")
BLOCK = PREFIX_BLOCK_TOKENS
LINES = LatencyLines(1e6, 5e6, 500.0, 1e6, 10e6, 10.5e6, prefill_chunk_tokens=64)
OBJECTIVES = TokenObjectives(60_000 * MS, 100 * MS)
HEAD = tuple(range(1, 31))
"""The numbers of a text of 30 blocks, a second to be read."""


def whole(agent: str) -> tuple[ChainHop, ...]:
    return (ChainHop(AgentId(agent), PartitionKey(MODEL, 0, 6), 0, 6),)


class Cluster:
    """A dispatcher over chains of one agent each; requests end when the test says so."""

    def __init__(
        self,
        policy: str,
        *agents: str,
        capacity: int = 8,
        service_ms: dict[str, int] | None = None,
        lines: LatencyLines | None = LINES,
    ) -> None:
        self.dispatcher = ChainedDispatcher(ChainedConfig(checked=True), policy=policy)
        self.now = 0
        self.count = 0
        self.asked: dict[RequestId, SessionRequested] = {}
        self.started: dict[RequestId, StartSession] = {}
        for agent in agents:
            self.join(agent)
        chains = tuple(
            Chain(each, whole(each), capacity, (service_ms or {}).get(each, 3000) * MS, lines=lines)
            for each in agents
        )
        served = ModelPlan(MODEL, FAR, (), chains=chains, session_tokens=4096)
        self.plan = Plan(PlanId("p"), (served,))
        self.tell(PlanActivated(self.plan))

    def join(self, agent: str) -> None:
        self.tell(AgentJoined(Agent(AgentId(agent), "x", ServerId(agent), 1, 1)))

    def tell(self, event: Event) -> list[Command]:
        commands = self.dispatcher.handle(event, self.now)
        for command in commands:
            if isinstance(command, StartSession):
                self.started[command.request] = command
            elif isinstance(command, CloseSessions):
                self.tell(SessionsClosed(command.agent, command.sessions))
        return commands

    def ask(self, hashes: tuple[int, ...], more: int = 8, **facts: object) -> RequestId:
        self.count += 1
        request = RequestId(GatewayId("g"), self.count)
        event = SessionRequested(
            request,
            MODEL,
            len(hashes) * BLOCK + more,
            200,
            FAR,
            arrived_ns=self.now,
            prefix_hashes=hashes,
            **facts,
        )
        self.asked[request] = event
        self.tell(event)
        return request

    def chain_of(self, request: RequestId) -> str:
        return self.started[request].chain_id

    def first_token(self, request: RequestId, cached: int = 0) -> None:
        progress = SessionProgress(request, 1, MS, 0, cached)
        self.tell(SessionsProgressed((progress,)))

    def end(self, request: RequestId, more: tuple[int, ...] = (), cached: int = 0) -> None:
        self.first_token(request, cached)
        progress = SessionProgress(request, 20, MS, 20 * MS, cached)
        self.tell(RequestCompleted(request, progress, more))
        started = self.started[request]
        for hop in started.hops:
            self.tell(SessionsClosed(hop.agent, (started.session,)))

    @property
    def prefixes(self) -> PrefixDirectory:
        return self.dispatcher._table.model_queue(MODEL).prefixes


POLICIES = ["jffc", "slo", "least-time"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_turn_goes_where_the_turn_before_it_was(policy: str) -> None:
    cluster = Cluster(policy, "a", "b", "c")
    others = [cluster.ask(()) for _ in range(2)]
    first = cluster.ask(HEAD)
    history, place = HEAD, cluster.chain_of(first)
    for request in others:
        cluster.end(request)
    cluster.end(first, (101, 102))
    for turn in range(3):
        history = (*history, 101 + 10 * turn, 102 + 10 * turn)
        request = cluster.ask(history)
        assert cluster.chain_of(request) == place
        assert cluster.prefixes.tokens_on(history, FAR) == {whole(place): len(history) * BLOCK}
        cluster.end(request, (111 + 10 * turn, 112 + 10 * turn), cached=len(history) * BLOCK)
        cluster.prefixes.validate()


@pytest.mark.parametrize("policy", ["slo", "least-time"])
def test_requests_with_objectives_go_there_as_well(policy: str) -> None:
    cluster = Cluster(policy, "a", "b", "c")
    others = [cluster.ask((), objectives=OBJECTIVES) for _ in range(2)]
    first = cluster.ask(HEAD, objectives=OBJECTIVES)
    place = cluster.chain_of(first)
    for request in (*others, first):
        cluster.end(request)
    assert cluster.chain_of(cluster.ask(HEAD, objectives=OBJECTIVES)) == place


def test_a_chain_that_saves_less_than_it_is_slower_by_is_not_taken() -> None:
    """30 blocks are 960 ms of a prompt by the lines of these chains."""
    for slower_ms, taken in ((500, "b"), (1500, "a")):
        cluster = Cluster("jffc", "a", "b", service_ms={"a": 3000, "b": 3000 + slower_ms})
        cluster.prefixes.seen(whole("b"), HEAD)
        assert cluster.chain_of(cluster.ask(HEAD)) == taken


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_chain_is_not_waited_for(policy: str) -> None:
    cluster = Cluster(policy, "a", "b", capacity=2)
    cluster.prefixes.seen(whole("b"), HEAD)
    chains = [cluster.chain_of(cluster.ask(HEAD)) for _ in range(4)]
    assert chains[:2] == ["b", "b"] or policy == "least-time"
    assert Counter(chains) == {"a": 2, "b": 2}


def test_load_outweighs_what_is_saved() -> None:
    """Each further session on a chain slows all others down, so some read the text elsewhere."""
    cluster = Cluster("least-time", "a", "b", capacity=32)
    cluster.prefixes.seen(whole("b"), HEAD)
    chains = Counter(cluster.chain_of(cluster.ask(HEAD)) for _ in range(32))
    assert chains["b"] > chains["a"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_predicted_first_token_knows_what_is_saved(policy: str) -> None:
    if policy == "jffc":  # it predicts nothing
        return
    expected = []
    for hashes in ((), HEAD):
        cluster = Cluster(policy, "a")
        cluster.prefixes.seen(whole("a"), hashes)
        request = cluster.ask(HEAD)
        expected.append(cluster.started[request].predicted_first_token_ns)
    assert expected[0] - expected[1] > 0.9 * 30 * BLOCK * MS
    assert expected[1] > 0


def test_a_belief_that_was_wrong_is_corrected_by_the_session_that_followed_it() -> None:
    cluster = Cluster("least-time", "a", "b")
    cluster.prefixes.seen(whole("b"), (*HEAD, 900))
    request = cluster.ask((*HEAD, 900))
    assert cluster.chain_of(request) == "b"
    cluster.first_token(request, cached=10 * BLOCK)
    assert cluster.dispatcher.statistics()["lacked_prefixes"] == 1
    # It has read the rest by now, so the chain has all of it once more.
    assert cluster.prefixes.tokens_on((*HEAD, 900), FAR) == {whole("b"): 31 * BLOCK}
    other = cluster.ask((*HEAD, 900))
    cluster.first_token(other, cached=31 * BLOCK)
    assert cluster.dispatcher.statistics()["lacked_prefixes"] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_an_agent_that_was_lost_has_nothing_when_it_comes_back(policy: str) -> None:
    cluster = Cluster(policy, "a", "b")
    cluster.prefixes.seen(whole("b"), HEAD)
    cluster.tell(AgentLost(AgentId("b")))
    assert not len(cluster.prefixes)
    cluster.join("b")
    assert cluster.chain_of(cluster.ask(HEAD)) == "a"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_new_plan_with_the_same_chains_changes_no_belief(policy: str) -> None:
    cluster = Cluster(policy, "a", "b")
    cluster.prefixes.seen(whole("b"), HEAD)
    cluster.tell(PlanActivated(cluster.plan))
    assert cluster.chain_of(cluster.ask(HEAD)) == "b"


def test_where_no_times_are_known_the_chain_that_has_most_is_taken() -> None:
    cluster = Cluster("jffc", "a", "b", "c", lines=None)
    cluster.prefixes.seen(whole("b"), HEAD[:10])
    cluster.prefixes.seen(whole("c"), HEAD)
    assert cluster.chain_of(cluster.ask(HEAD)) == "c"


def test_the_directory_forgets_what_was_not_used_for_longest() -> None:
    directory = PrefixDirectory()
    a, b = whole("a"), whole("b")
    directory.seen(a, HEAD)
    directory.seen(b, HEAD[:5], room_tokens=3 * BLOCK)
    assert directory.tokens_on(HEAD, FAR) == {a: 30 * BLOCK, b: 3 * BLOCK}
    assert directory.tokens_on(HEAD, 2 * BLOCK + 7) == {a: 2 * BLOCK, b: 2 * BLOCK}
    assert directory.tokens_on(HEAD, BLOCK - 1) == {}
    assert directory.tokens_on((77, *HEAD), FAR) == {}
    directory.lacked(a, HEAD, 4 * BLOCK)
    assert directory.tokens_on(HEAD, FAR)[a] == 4 * BLOCK
    directory.validate()


@pytest.mark.parametrize("seed", range(5))
def test_the_directory_keeps_its_invariant_whatever_comes(seed: int) -> None:
    draw = random.Random(seed)
    directory = PrefixDirectory()
    chains = [whole(name) for name in "abc"]
    for _ in range(300):
        text = tuple(draw.sample(range(40), draw.randrange(12)))
        kind = draw.randrange(4)
        if kind <= 1:
            directory.seen(draw.choice(chains), text, draw.choice([0, 5 * BLOCK]))
        elif kind == 2:
            directory.lacked(draw.choice(chains), text, BLOCK * draw.randrange(12))
        elif draw.random() < 0.1:
            directory.agent_lost(AgentId(draw.choice("abc")))
        directory.validate()
        for hops, tokens in directory.tokens_on(text, FAR).items():
            assert hops in chains
            assert 0 < tokens <= len(text) * BLOCK


def test_a_head_that_many_requests_begin_with_is_common_and_a_history_is_not() -> None:
    directory = PrefixDirectory()
    directory.asked(HEAD)
    assert directory.common_tokens(HEAD) == 0, "nobody has it, so nothing is counted"
    directory.seen(whole("a"), (*HEAD, 900, 901))
    for turn in range(40):
        directory.asked((*HEAD, 1000 + turn))
    directory.asked((*HEAD, 900, 901))
    assert directory.common_tokens((*HEAD, 900, 901)) == len(HEAD) * BLOCK
    assert directory.common_tokens((7777, *HEAD)) == 0
    directory.agent_lost(AgentId("a"))
    assert directory.common_tokens(HEAD) == 0
    directory.validate()


def test_chats_with_one_head_use_all_machines() -> None:
    """The head is read once on each of them, and then none has an advantage."""
    cluster = Cluster("least-time", "a", "b", "c", capacity=32)
    used: Counter[str] = Counter()
    running: list[RequestId] = []
    for chat in range(120):
        request = cluster.ask((*HEAD, 5000 + chat))
        used[cluster.chain_of(request)] += 1
        running.append(request)
        if len(running) > 9:
            cluster.end(running.pop(0))
    assert max(used.values()) <= 1.3 * sum(used.values()) / 3
