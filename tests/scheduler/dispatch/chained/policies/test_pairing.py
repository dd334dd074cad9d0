"""Split phase: a session books a chain for its prompt and one for the rest, and leaves them apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    AgentLost,
    PlanActivated,
    SessionFailed,
    SessionsHeld,
    StartSession,
)
from catenary_services.domain.ids import AgentId
from catenary_services.domain.plan import Chain, Plan
from scheduling_cases.chain_bench import (
    ChainBench,
    chain,
    closes,
    hop,
    only,
    plan,
    rejects,
    slots_of,
    started,
)


def prefill(name: str, capacity: int, *hops) -> Chain:
    return replace(chain(name, capacity, 50, *hops), role="prefill")


def decode(name: str, capacity: int, *hops) -> Chain:
    return replace(chain(name, capacity, 80, *hops), role="decode")


TWO_RINGS = plan(prefill("a", 1), decode("ring", 2, hop("b", 0, 2), hop("c", 2, 6)))
MANY = plan(prefill("a", 1), prefill("b", 2), decode("c", 2), decode("d", 2))


def agents_of(started: StartSession) -> tuple[list[str], list[str]]:
    return [h.agent for h in started.hops], [h.agent for h in started.decode_hops]


@pytest.mark.parametrize("policy", ["jffc", "slo", "least-time"])
def test_a_session_books_both_chains_at_once(policy: str) -> None:
    bench = ChainBench(TWO_RINGS, policy=policy)
    session = bench.start(0)
    assert agents_of(session) == (["a"], ["b", "c"])
    assert session.chain_id == "a+ring"
    assert bench.booked() == {"a": 6, "b": 2, "c": 4}


@pytest.mark.parametrize("policy", ["jffc", "slo", "least-time"])
def test_the_next_prompt_starts_as_soon_as_the_caches_are_handed_over(policy: str) -> None:
    bench = ChainBench(TWO_RINGS, policy=policy)
    first = bench.start(0)
    assert bench.ask(1) == []  # the one place for prompts is taken
    second = only(bench.closed(2, "a", first), StartSession)
    assert agents_of(second) == (["a"], ["b", "c"])
    assert slots_of(bench.dispatcher.snapshot(), first) == {"b": 2, "c": 4}
    assert bench.closed(3, "a", second) == []
    assert bench.ask(4) == []  # now the ring that generates is full
    assert started(bench.closed(5, "b", first)) == []
    assert closes(bench.finished(6, first)) == {"c": (first.session,)}
    assert len(started(bench.closed(7, "c", first))) == 1


def test_a_prompt_that_is_done_is_no_sign_that_the_answer_is() -> None:
    bench = ChainBench(TWO_RINGS)
    session = bench.start(0, budget_ms=60_000)
    bench.closed(1, "a", session)
    bench.closed(1, "a", session)  # said twice, after an order that crossed it
    assert bench.tick(50_000) == []
    assert bench.figure("undelivered_sessions") == 0
    assert bench.figure("sessions_in_flight") == 1
    bench.closed(50_001, "c", session)  # of the ring that generates it is
    bench.tick(58_000)
    assert bench.figure("undelivered_sessions") == 1


def test_an_agent_lost_after_the_hand_over_is_not_missed() -> None:
    bench = ChainBench(TWO_RINGS)
    session = bench.start(0)
    bench.closed(1, "a", session)
    assert bench.tell(2, AgentLost(AgentId("a"))) == []
    assert bench.figure("restarted_sessions") == 0
    commands = bench.tell(3, AgentLost(AgentId("c")))
    assert closes(commands) == {"b": (session.session,)}
    assert bench.figure("restarted_sessions") == 1


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_an_agent_lost_before_starts_the_request_again_on_both_sides(lost: str) -> None:
    bench = ChainBench(TWO_RINGS)
    session = bench.start(0)
    commands = bench.tell(1, AgentLost(AgentId(lost)))
    held = {"a", "b", "c"} - {lost}
    assert closes(commands) == dict.fromkeys(held, (session.session,))
    for agent in sorted(held):
        commands += bench.closed(2, agent, session)
    commands += bench.join(3, lost)
    again = [each for each in commands if isinstance(each, StartSession)]
    assert len(again) == 1
    assert again[0].request == session.request
    assert again[0].session != session.session


def test_the_least_loaded_chain_of_each_side_is_taken() -> None:
    bench = ChainBench(MANY)
    pairs = [agents_of(bench.start(at)) for at in range(3)]
    assert pairs == [(["a"], ["c"]), (["b"], ["d"]), (["b"], ["c"])]
    assert bench.ask(4) == []
    assert bench.booked() == {"a": 6, "b": 12, "c": 12, "d": 6}


def test_one_token_needs_no_second_chain() -> None:
    bench = ChainBench(TWO_RINGS)
    session = only(bench.ask(0, tokens=1), StartSession)
    assert agents_of(session) == (["a"], [])
    assert bench.booked() == {"a": 6}
    bench.end(1, session)
    assert bench.booked() == {}


@pytest.mark.parametrize("policy", ["jffc", "slo", "sed", "sa-jsq", "jsq", "jiq"])
def test_without_agents_for_prompts_the_others_do_both_and_the_other_way_round(policy: str) -> None:
    roomy = plan(prefill("a", 4), prefill("b", 4), decode("c", 2), decode("d", 2))
    bench = ChainBench(roomy, policy=policy, random_below=lambda n: 0)
    for agent in "ab":
        bench.tell(0, AgentLost(AgentId(agent)))
    alone = bench.start(1)
    assert alone.decode_hops == ()
    assert alone.hops[0].agent in ("c", "d")
    for agent in "ab":
        bench.join(2, agent)
    assert bench.start(3).decode_hops != ()
    for agent in "cd":
        bench.tell(4, AgentLost(AgentId(agent)))
    assert bench.start(5).hops[0].agent in ("a", "b")


@pytest.mark.parametrize("policy", ["sed", "sa-jsq", "jsq", "jiq"])
def test_who_is_bound_to_a_pair_starts_when_both_have_room(policy: str) -> None:
    bench = ChainBench(TWO_RINGS, policy=policy, random_below=lambda n: 0)
    first = bench.start(0)
    assert bench.ask(1) == bench.ask(2) == []
    second = only(bench.closed(3, "a", first), StartSession)
    assert bench.closed(4, "a", second) == []  # the ring that generates is full
    bench.closed(5, "b", first)
    assert closes(bench.finished(6, first)) == {"c": (first.session,)}
    assert started(bench.closed(7, "c", first)) == [(3, "a+ring")]


def test_a_failure_on_either_side_closes_both() -> None:
    bench = ChainBench(TWO_RINGS)
    session = bench.start(0)
    failed = SessionFailed(session.session, AgentId("c"), "PARTITION_LOST", "no caches", True)
    commands = bench.tell(1, failed)
    assert closes(commands) == dict.fromkeys("abc", (session.session,))
    assert rejects(commands) == []


def test_a_new_plan_without_roles_serves_who_waits_while_pairs_end() -> None:
    bench = ChainBench(TWO_RINGS)
    session = bench.start(0)
    bench.ask(1)
    mixed: Plan = plan(chain("d", 1, 50))
    assert started(bench.tell(2, PlanActivated(mixed))) == [(2, "d")]
    bench.closed(3, "a", session)
    for agent in "cb":
        bench.closed(4, agent, session)
    bench.finished(5, session)
    assert bench.booked() == {"d": 6}


def test_a_new_scheduler_goes_on_with_the_ring_that_generates() -> None:
    old = ChainBench(TWO_RINGS)
    session = old.start(0)
    old.closed(1, "a", session)
    new = ChainBench(None, epoch=2)
    new.dispatcher.restore(old.dispatcher.snapshot())
    new.tell(2, PlanActivated(TWO_RINGS))
    assert (
        new.ask(3, in_flight=AdoptedSession(session.session, session.decode_hops), number=1) == []
    )
    assert new.figure("adopted_sessions") == 1
    assert new.booked() == {"b": 2, "c": 4}
    assert agents_of(new.start(4)) == (["a"], ["b", "c"])
    assert new.end(5, replace(session, hops=session.decode_hops)) == []
    assert new.booked() == {"a": 6, "b": 2, "c": 4}


def test_after_a_fail_over_an_agent_that_ran_the_prompt_may_still_say_so() -> None:
    session = ChainBench(TWO_RINGS).start(0)
    new = ChainBench(None, agents="", epoch=2)
    new.tell(1, PlanActivated(TWO_RINGS))
    for agent in "abc":  # the last rows are on their way
        hops = session.hops if agent == "a" else session.decode_hops
        new.tell(2, SessionsHeld(AgentId(agent), (AdoptedSession(session.session, hops),)))
        new.join(2, agent)
    new.ask(3, 60_000, in_flight=AdoptedSession(session.session, session.decode_hops), number=1)
    new.closed(4, "a", session)
    new.tick(30_000)
    assert new.figure("undelivered_sessions") == new.figure("restarted_sessions") == 0
    assert new.booked() == {"b": 2, "c": 4}
