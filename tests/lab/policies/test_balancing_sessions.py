"""JSQ by sessions, two choices and least context: where they send a request."""

from __future__ import annotations

import pytest

from catenary_lab.policies import policy_named
from catenary_lab.policies.balancing_sessions import (
    FewestSessions,
    PowerOfTwoChoices,
)
from catenary_scheduler.book.caches import SlotClaims
from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    PlanActivated,
    SessionProgress,
    SessionRequested,
    SessionsProgressed,
    StartSession,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.plan import Agent, CacheCapacity, Chain, ChainHop, ModelPlan, Plan

MODEL = ModelKey("m", "1")
PART = PartitionKey(MODEL, 0, 1)
GATEWAY = GatewayId("g")
NOBODY = SlotClaims((), ())


def request(number: int, prompt_tokens: int = 10) -> SessionRequested:
    return SessionRequested(RequestId(GATEWAY, number), MODEL, prompt_tokens, 50, 1 << 40)


def routes_with(*running: int) -> list[ChainState]:
    routes = [ChainState(f"c{index}", (), NOBODY, 1000, 1, index) for index in range(len(running))]
    for route, sessions in zip(routes, running, strict=True):
        route.running = sessions
    return routes


def dispatcher(policy: str, capacity: int = 100) -> ChainedDispatcher:
    made = ChainedDispatcher(
        ChainedConfig(checked=True), policy=policy_named(policy, lambda limit: limit - 1)
    )
    names = [AgentId(f"a{index}") for index in range(3)]
    for name in names:
        made.handle(AgentJoined(Agent(name, "cpu", ServerId(name), 1, 1)), 0)
    chains = tuple(Chain(f"c-{name}", (ChainHop(name, PART, 0, 1),), capacity, 1) for name in names)
    caches = tuple(CacheCapacity(name, PART, capacity) for name in names)
    made.handle(
        PlanActivated(
            Plan(PlanId("p"), (ModelPlan(MODEL, 1 << 40, (), chains=chains, caches=caches),))
        ),
        0,
    )
    return made


def placed(made: ChainedDispatcher, event: SessionRequested, now: int = 1) -> str | None:
    started = [each for each in made.handle(event, now) if isinstance(each, StartSession)]
    return str(started[0].hops[0].agent) if started else None


def test_the_fewest_sessions_win_whatever_the_capacity() -> None:
    policy = FewestSessions(lambda limit: 0)
    routes = routes_with(3, 1, 2)
    routes[1].capacity = 1  # by slots it would be full
    policy.rebuild(routes)
    assert policy.choose(request(1)) is routes[1]


def test_ties_are_settled_by_chance() -> None:
    drawn: list[int] = []

    def below(limit: int) -> int:
        drawn.append(limit)
        return limit - 1

    policy = FewestSessions(below)
    routes = routes_with(2, 1, 1)
    policy.rebuild(routes)
    assert policy.choose(request(1)) is routes[2]
    assert drawn == [2]


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(2))
def test_two_choices_are_two_different_chains_and_the_better_is_taken(first, second) -> None:
    numbers = iter([first, second])
    policy = PowerOfTwoChoices(lambda limit: next(numbers))
    routes = routes_with(5, 4, 3)
    policy.rebuild(routes)
    other = [index for index in range(3) if index != first][second]
    chosen = policy.choose(request(1))
    assert chosen is routes[max(first, other)]


@pytest.mark.parametrize("kind", [FewestSessions, PowerOfTwoChoices])
def test_without_chains_there_is_no_choice_and_with_one_no_question(kind) -> None:
    policy = kind(lambda limit: 0)
    policy.rebuild([])
    assert policy.choose(request(1)) is None
    only = routes_with(7)
    policy.rebuild(only)
    assert policy.choose(request(1)) is only[0]


@pytest.mark.parametrize("policy", ["fewest-sessions", "power-of-two"])
def test_sessions_spread_over_the_chains(policy) -> None:
    made = dispatcher(policy)
    agents = [placed(made, request(number)) for number in range(30)]
    counts = [agents.count(name) for name in ("a0", "a1", "a2")]
    assert sum(counts) == 30
    if policy == "fewest-sessions":
        assert counts == [10, 10, 10]


def test_least_context_follows_prompts_and_what_is_generated() -> None:
    made = dispatcher("least-loaded")
    assert placed(made, request(1, prompt_tokens=100)) == "a0"
    assert placed(made, request(2, prompt_tokens=10)) == "a1"
    assert placed(made, request(3, prompt_tokens=50)) == "a2"
    assert placed(made, request(4, prompt_tokens=5)) == "a1"
    grown = SessionProgress(RequestId(GATEWAY, 2), 200, 10, 100)
    made.handle(SessionsProgressed((grown,)), 2)
    assert placed(made, request(5), now=3) == "a2"
    assert placed(made, request(6), now=3) == "a2"


def test_least_context_waits_where_no_slot_is_free() -> None:
    made = dispatcher("least-loaded", capacity=1)
    assert [placed(made, request(number)) for number in range(4)] == ["a0", "a1", "a2", None]
    assert made.queued(MODEL) == 1
