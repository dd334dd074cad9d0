"""More slots than memory: who is let in, who moves away, who has to wait; and all are answered."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_lab.policies import policy_named
from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    CachesReported,
    CloseSessions,
    Command,
    PlanActivated,
    Reject,
    RequestCompleted,
    SessionFailed,
    SessionMoved,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
    SessionId,
)
from catenary_services.domain.plan import Agent, CacheCapacity, Chain, ModelPlan, Plan
from catenary_services.errors import CacheFull
from scheduling_cases.chain_bench import LLAMA, MS, ChainBench, chain, closes, hop, rejects, started

SESSION_TOKENS = 512
A = AgentId("a")


def oversubscribed(*chains: Chain, tokens: int = SESSION_TOKENS, packing: str = "off") -> Plan:
    """Returns a plan whose chains hold `tokens` each, with memory just for that on every agent."""
    held = tuple(replace(each, cache_tokens=float(tokens)) for each in chains)
    slots: dict[tuple[AgentId, PartitionKey], int] = {}
    memory: dict[tuple[AgentId, PartitionKey], int] = {}
    for each in held:
        for one in each.hops:
            key = (one.agent, one.partition)
            slots[key] = slots.get(key, 0) + one.blocks * each.capacity
            memory[key] = memory.get(key, 0) + one.blocks * tokens
    caches = tuple(CacheCapacity(*key, slots[key], memory[key]) for key in slots)
    model = ModelPlan(LLAMA, 10**9, (), True, held, caches, SESSION_TOKENS)
    return Plan(PlanId("p"), (model,))


class OverflowBench(ChainBench):
    def prompt(self, at_ms: float, prompt_tokens: int, tokens: int = 100) -> list[Command]:
        self.number += 1
        request = RequestId(GatewayId("g"), self.number)
        deadline = round((at_ms + 100_000) * MS)
        event = SessionRequested(request, LLAMA, prompt_tokens, tokens, deadline)
        return self.tell(at_ms, event)

    def begin(self, at_ms: float, prompt_tokens: int, tokens: int = 100) -> StartSession:
        (command,) = self.prompt(at_ms, prompt_tokens, tokens)
        assert isinstance(command, StartSession)
        return command

    def progress(self, at_ms: float, *generated: tuple[StartSession, int]) -> list[Command]:
        sessions = tuple(SessionProgress(s.request, tokens, MS, 0) for s, tokens in generated)
        return self.tell(at_ms, SessionsProgressed(sessions))

    def full(self, at_ms: float, session: StartSession, agent: str = "a") -> list[Command]:
        self.closed(at_ms, agent, session)
        failed = SessionFailed(session.session, AgentId(agent), CacheFull.reason, "full", True)
        return self.tell(at_ms, failed)


@pytest.mark.parametrize("policy", ["jffc", "slo", "least-time", "jsq", "least-loaded"])
def test_a_session_begins_only_where_there_is_memory_for_it(policy: str) -> None:
    bench = OverflowBench(
        oversubscribed(chain("a", 8, 40)), policy=policy, random_below=lambda n: 0
    )
    first = bench.begin(0, 200)
    bench.begin(0, 160)
    assert started(bench.prompt(1, 100)) == []  # 208 + 160 + 112, and room to grow, is too much
    assert bench.figure("queued_requests") == 1
    assert started(bench.end(2, first)) == [(3, "a")]


def test_slots_alone_count_where_every_session_may_be_long() -> None:
    bench = OverflowBench(oversubscribed(chain("a", 8, 40), tokens=8 * SESSION_TOKENS))
    for _ in range(8):
        bench.begin(0, SESSION_TOKENS - 1, 1)
    assert started(bench.prompt(0, 1)) == []  # a ninth


def test_a_chain_without_sessions_takes_any_of_them() -> None:
    bench = OverflowBench(oversubscribed(chain("a", 8, 40)))
    bench.begin(0, SESSION_TOKENS - 2, 2)


def test_the_next_chain_is_taken_where_the_fastest_has_no_memory() -> None:
    bench = OverflowBench(oversubscribed(chain("a", 8, 40), chain("b", 8, 50)))
    bench.begin(0, 400)
    assert started(bench.prompt(0, 200)) == [(2, "b")]
    assert started(bench.prompt(0, 10)) == [(3, "a")]  # the small one still fits


def test_under_slo_a_large_request_is_not_overtaken_for_ever() -> None:
    bench = OverflowBench(oversubscribed(chain("a", 8, 40)), policy="slo")
    bench.begin(0, 300)
    assert started(bench.prompt(0, 400)) == []
    assert started(bench.prompt(10, 10)) == [(3, "a")]
    assert started(bench.prompt(3_000, 10)) == []


def test_a_chain_about_to_overflow_has_the_smallest_sufficient_session_move() -> None:
    bench = OverflowBench(oversubscribed(chain("a", 8, 40), chain("b", 8, 50)))
    small, middle = bench.begin(0, 60), bench.begin(0, 120)
    large = bench.begin(0, 160)
    commands = bench.progress(100, (small, 2), (middle, 70), (large, 80))
    (move,) = commands
    assert isinstance(move, StartSession)
    assert move.chain_id == "b"
    assert move.moves == small.session  # 64 + 192 + 240 and 48 to come are 32 too many
    assert bench.figure("overflow_moves") == 1
    assert bench.figure("preempted_sessions") == 0


def test_the_youngest_waits_where_no_chain_has_room() -> None:
    bench = OverflowBench(oversubscribed(chain("a", 8, 40)))
    old, young = bench.begin(0, 200), bench.begin(1, 200)
    commands = bench.progress(100, (old, 60), (young, 90))
    assert closes(commands) == {A: (young.session,)}
    assert bench.figure("preempted_sessions") == 1
    assert bench.figure("restarted_sessions") == 0
    assert started(bench.closed(101, "a", young)) == []  # it does not fit beside the other yet
    assert started(bench.end(200, old)) == [(2, "a")]


def test_who_waits_for_memory_goes_before_who_is_new() -> None:
    bench = OverflowBench(oversubscribed(chain("a", 8, 40)))
    old, young = bench.begin(0, 200), bench.begin(1, 200)
    bench.progress(100, (old, 60), (young, 90))
    bench.closed(101, "a", young)
    assert started(bench.prompt(102, 10)) == []
    assert started(bench.end(200, old)) == [(2, "a"), (3, "a")]


def test_one_session_alone_is_never_preempted() -> None:
    bench = OverflowBench(oversubscribed(chain("a", 8, 40)))
    alone = bench.begin(0, 500, 12)
    assert bench.progress(100, (alone, 12)) == []


def test_an_agent_that_was_full_is_not_to_blame_and_no_restart_is_counted() -> None:
    bench = OverflowBench(
        oversubscribed(chain("a", 8, 40)), ChainedConfig(max_restarts=0, suspicion_ns=10**12)
    )
    first, second = bench.begin(0, 100), bench.begin(0, 100)
    assert rejects(bench.full(1, second)) == []
    assert bench.figure("preempted_sessions") == 1
    assert bench.figure("usable_chains") == 1
    assert started(bench.end(2, first)) == [(2, "a")]


def test_an_agent_that_was_full_takes_nobody_until_it_says_that_it_has_room() -> None:
    plan = oversubscribed(chain("a", 8, 40))
    bench = OverflowBench(plan)
    bench.begin(0, 100)
    bench.full(1, bench.begin(0, 100))
    assert started(bench.prompt(2, 10)) == []
    partition = plan.models[0].chains[0].hops[0].partition
    freed = bench.tell(1_000, CachesReported(A, partition, 6 * 112))
    assert started(freed) == [(2, "a"), (3, "a")]


def test_what_an_agent_holds_beyond_what_is_known_counts() -> None:
    plan = oversubscribed(chain("a", 8, 40))
    bench = OverflowBench(plan)
    first = bench.begin(0, 100)
    partition = plan.models[0].chains[0].hops[0].partition
    bench.tell(1, CachesReported(A, partition, 6 * 480))
    assert started(bench.prompt(2, 100)) == []
    assert started(bench.end(3, first)) == [(2, "a")]  # of an empty cache it is out of date


def test_memory_is_counted_for_chains_that_share_an_agent() -> None:
    shared = hop("a", 0, 3)
    bench = OverflowBench(
        oversubscribed(
            chain("one", 8, 40, shared, hop("b", 3, 6)), chain("two", 8, 50, shared, hop("c", 3, 6))
        )
    )
    bench.begin(0, 400)
    bench.begin(0, 400)
    caches = {str(each.agent): each.tokens for each in bench.book.slots.caches()}
    assert caches == {"a": 2 * 3 * 400, "b": 3 * 400, "c": 3 * 400}


# All are answered


@dataclass
class Machine:
    """Agents and a gateway: sessions grow, agents never hold more than they can."""

    plan: Plan
    policy: str
    rng: random.Random
    now: int = 0
    left: dict[RequestId, int] = field(default_factory=dict)
    """Tokens still to be generated."""
    tokens: dict[RequestId, int] = field(default_factory=dict)
    prompts: dict[RequestId, int] = field(default_factory=dict)
    current: dict[RequestId, StartSession] = field(default_factory=dict)
    coming: dict[RequestId, tuple[StartSession, int]] = field(default_factory=dict)
    most_held: int = 0
    refused: list[Reject] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dispatcher = ChainedDispatcher(
            ChainedConfig(max_restarts=0, checked=True),
            policy=policy_named(self.policy, self.rng.randrange),
        )
        for agent in "abc":
            self.tell(AgentJoined(Agent(AgentId(agent), "x", ServerId(agent), 1, 1)))
        self.tell(PlanActivated(self.plan))

    def tell(self, event: object) -> None:
        for command in self.dispatcher.handle(event, self.now):  # type: ignore[arg-type]
            self.obey(command)

    def obey(self, command: Command) -> None:
        if isinstance(command, Reject):
            self.refused.append(command)
            self.left.pop(command.request, None)
        elif isinstance(command, StartSession) and command.moves is not None:
            self.coming[command.request] = (command, self.now + self.rng.randrange(50, 3000) * MS)
        elif isinstance(command, StartSession):
            self.current[command.request] = command
        elif isinstance(command, CloseSessions):
            for session in command.sessions:
                self.gone(session)
            self.later.append(SessionsClosed(command.agent, command.sessions))

    later: list[object] = field(default_factory=list)

    def gone(self, session: SessionId) -> None:
        self.current = {r: s for r, s in self.current.items() if s.session != session}
        self.coming = {r: s for r, s in self.coming.items() if s[0].session != session}

    def run(self, arrivals: list[tuple[int, int, int]]) -> None:
        """Runs until all are answered; arrivals are times in ms, prompts and answers in tokens."""
        waiting = sorted(arrivals)
        number = 0
        while waiting or self.left:
            self.now += 50 * MS
            assert self.now < 10_000_000 * MS
            while waiting and waiting[0][0] * MS <= self.now:
                _, prompt, answer = waiting.pop(0)
                number += 1
                request = RequestId(GatewayId("g"), number)
                self.left[request], self.prompts[request] = answer, prompt
                self.tokens[request] = 0
                asked = SessionRequested(request, LLAMA, prompt, answer, 10**18)
                self.tell(asked)
            self.step()

    def step(self) -> None:
        events, self.later = self.later, []
        for event in events:
            self.tell(event)
        for request, (new, due) in list(self.coming.items()):
            if due <= self.now and request in self.coming:
                old = self.current[request]
                del self.coming[request]
                self.current[request] = new
                self.tell(SessionMoved(new.session, old.session))
                self.tell(SessionsClosed(old.hops[0].agent, (old.session,)))
        for request in list(self.current):
            if request in self.current:
                self.grow(request)
        self.guard()
        sessions = tuple(
            SessionProgress(request, self.tokens[request], MS, 0)
            for request in self.current
            if self.tokens[request]
        )
        self.tell(SessionsProgressed(sessions))
        self.tell(Tick())

    def grow(self, request: RequestId) -> None:
        more = min(self.rng.randrange(0, 8), self.left[request])
        self.left[request] -= more
        self.tokens[request] += more
        if not self.left[request]:
            session = self.current.pop(request)
            del self.left[request]
            self.coming.pop(request, None)
            for each in session.hops:
                self.tell(SessionsClosed(each.agent, (session.session,)))
            self.tell(RequestCompleted(request))

    def guard(self) -> None:
        """As agents do: the youngest session goes until what is cached fits."""
        for cache in self.plan.models[0].caches:
            while True:
                here = [
                    (s.session, r, s)
                    for r, s in [
                        *self.current.items(),
                        *((r, c[0]) for r, c in self.coming.items()),
                    ]
                    for each in s.hops
                    if (each.agent, each.partition) == (cache.agent, cache.partition)
                ]
                held = sum(self.size(r, s, cache.agent) for _, r, s in here)
                if held <= cache.cache_tokens or len(here) == 1:
                    break
                session_id, _, session = max(here, key=lambda each: each[0])
                self.gone(session_id)
                for each in session.hops:
                    self.tell(SessionsClosed(each.agent, (session_id,)))
                self.tell(SessionFailed(session_id, cache.agent, CacheFull.reason, "", True))
            self.most_held = max(self.most_held, held)

    def size(self, request: RequestId, session: StartSession, agent: AgentId) -> int:
        tokens = self.prompts[request] + self.tokens[request]
        blocks = sum(each.blocks for each in session.hops if each.agent == agent)
        return -(-tokens // 16) * 16 * blocks


def two_chains() -> Plan:
    return oversubscribed(
        chain("one", 6, 40, hop("a", 0, 3), hop("b", 3, 6)),
        chain("two", 6, 50, hop("a", 0, 3), hop("c", 3, 6)),
    )


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    policy=st.sampled_from(["jffc", "slo", "least-time", "jsq", "least-loaded"]),
    arrivals=st.lists(
        st.tuples(st.integers(0, 3000), st.integers(1, 250), st.integers(1, 260)),
        min_size=1,
        max_size=16,
    ),
)
def test_whatever_grows_all_are_answered_and_none_is_refused(
    seed: int, policy: str, arrivals: list[tuple[int, int, int]]
) -> None:
    machine = Machine(two_chains(), policy, random.Random(seed))
    machine.run(arrivals)
    for event in machine.later:
        machine.dispatcher.handle(event, machine.now)  # type: ignore[arg-type]
    figures = machine.dispatcher.statistics()
    assert machine.refused == []
    assert figures["completed_requests"] == len(arrivals)
    assert figures["booked_sessions"] == figures["queued_requests"] == 0
    assert figures["restarted_sessions"] == 0
    caches = machine.dispatcher._book.slots.caches()
    assert all(cache.tokens == 0 for cache in caches)


def test_long_answers_on_a_full_cluster_are_preempted_and_come_to_their_end() -> None:
    machine = Machine(two_chains(), "jffc", random.Random(7))
    machine.run([(0, 50, 400)] * 12)
    figures = machine.dispatcher.statistics()
    assert figures["completed_requests"] == 12
    assert figures["preempted_sessions"] > 0
    # Each of twelve runs at most a few times: nobody is thrown out again and again.
    assert figures["started_sessions"] < 12 * 6
