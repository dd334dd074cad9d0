"""A new scheduler finds sessions: in the stored book, on agents, named by gateways."""

from __future__ import annotations

from itertools import permutations

import pytest

from catenary_scheduler.dispatch.chained import ChainedConfig
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    AgentLost,
    Command,
    PlanActivated,
    SessionsHeld,
    StartSession,
)
from catenary_services.domain.ids import AgentId
from scheduling_cases.chain_bench import (
    MS,
    ChainBench,
    adopted,
    chain,
    closes,
    hop,
    plan,
    rejects,
    slots_of,
    started,
)

RING = plan(chain("ring", 1, 50, hop("a", 0, 2), hop("b", 2, 6)), chain("c", 1, 80))
CONFIG = ChainedConfig(claim_grace_ns=20 * MS, close_patience_ns=1000 * MS)


def before() -> tuple[ChainBench, StartSession]:
    bench = ChainBench(RING)
    return bench, bench.start(0)


def successor(agents: str = "") -> ChainBench:
    return ChainBench(RING, CONFIG, agents=agents, epoch=2)


def hello(bench: ChainBench, at: float, agent: str, *sessions: StartSession) -> list[Command]:
    held = SessionsHeld(AgentId(agent), tuple(map(adopted, sessions)))
    return bench.tell(at, held) + bench.join(at, agent)


@pytest.mark.parametrize("order", list(permutations(["book", "agents", "gateway"])))
def test_a_session_goes_on_whoever_tells_of_it_first(order: tuple[str, ...]) -> None:
    old, session = before()
    bench = successor()
    commands: list[Command] = []
    for witness in order:
        if witness == "book":
            bench.dispatcher.restore(old.dispatcher.snapshot())
        elif witness == "agents":
            commands += hello(bench, 1, "a", session) + hello(bench, 1, "b", session)
        else:
            commands += bench.ask(1, in_flight=adopted(session), number=1)
    hello(bench, 2, "c")
    for at in (20, 40, 60):
        commands += bench.tick(at)
    assert commands == []
    assert slots_of(bench.dispatcher.snapshot(), session) == {"a": 2, "b": 4}
    assert started(bench.ask(61)) == [(2, "c")]  # the ring is full
    assert bench.figure("adopted_sessions") == 1
    bench.ask(62)
    assert started(bench.end(63, session)) == [(3, "ring")]


def test_the_ids_of_a_new_scheduler_are_its_own() -> None:
    _, session = before()
    bench = successor("abc")
    (first,) = bench.ask(0)
    assert isinstance(first, StartSession)
    assert first.session >> 40 == 2
    assert session.session >> 40 == 1


@pytest.mark.parametrize("restored", [False, True])
def test_a_session_one_of_its_agents_does_not_hold_is_started_again(restored: bool) -> None:
    old, session = before()
    bench = successor()
    if restored:
        bench.dispatcher.restore(old.dispatcher.snapshot())
    hello(bench, 1, "a", session)
    hello(bench, 1, "b")  # restarted meanwhile
    hello(bench, 1, "c")
    commands = bench.ask(2, in_flight=adopted(session), number=1)
    assert started(commands) == [(1, "c")]
    assert closes(commands) == {"a": (session.session,)}


def test_a_claimed_session_is_started_again_when_an_agent_says_it_has_it_not() -> None:
    _, session = before()
    bench = successor()
    hello(bench, 1, "c")
    assert bench.ask(1, in_flight=adopted(session), number=1) == []
    assert hello(bench, 2, "a", session) == []
    commands = hello(bench, 3, "b")
    assert started(commands) == [(1, "c")]
    assert closes(commands) == {"a": (session.session,)}


def test_a_claimed_session_whose_agent_never_comes_is_started_again() -> None:
    _, session = before()
    bench = successor()
    hello(bench, 1, "c")
    hello(bench, 1, "a", session)
    bench.ask(1, in_flight=adopted(session), number=1)
    assert bench.tick(20) == []
    commands = bench.tick(21)
    assert started(commands) == [(1, "c")]
    assert closes(commands) == {"a": (session.session,)}


@pytest.mark.parametrize("restored", [False, True])
def test_a_session_nobody_claims_is_closed(restored: bool) -> None:
    old, session = before()
    bench = successor()
    if restored:
        bench.dispatcher.restore(old.dispatcher.snapshot())
    hello(bench, 1, "a", session)
    hello(bench, 1, "b", session)
    assert bench.tick(20) == []
    assert closes(bench.tick(21)) == {"a": (session.session,), "b": (session.session,)}
    assert bench.figure("unclaimed_sessions") == 1
    # Too late now: it is started anew, once there is room.
    late = bench.ask(22, in_flight=adopted(session), number=1)
    assert started(late) == []
    bench.closed(23, "a", session)
    assert started(bench.closed(23, "b", session)) == [(1, "ring")]


def test_stored_slots_of_agents_that_do_not_come_are_free_after_the_grace() -> None:
    old, session = before()
    bench = successor()
    bench.dispatcher.restore(old.dispatcher.snapshot())
    assert bench.dispatcher.next_wakeup() is not None
    assert bench.tick(1) == []
    assert bench.booked() == {"a": 2, "b": 4}
    assert bench.dispatcher.next_wakeup() == 21 * MS
    assert bench.tick(21) == []
    assert bench.booked() == {}
    # The agent was only late, and still has it.
    assert closes(hello(bench, 22, "a", session)) == {}
    assert bench.booked() == {"a": 2}
    assert closes(bench.tick(42)) == {"a": (session.session,)}


def test_what_an_agent_holds_of_an_ended_session_is_closed_at_once() -> None:
    bench = ChainBench(plan(chain("a", 1, 50), chain("b", 1, 60)))
    session = bench.start(0)
    bench.tell(1, AgentLost(AgentId("a")))  # only its stream broke
    commands = hello(bench, 2, "a", session)
    assert closes(commands) == {"a": (session.session,)}
    assert bench.ask(3) == []  # a is full until it has answered
    assert started(bench.closed(4, "a", session)) == [(2, "a")]


def test_a_session_without_a_known_route_is_closed_where_it_is() -> None:
    _, session = before()
    bench = successor("abc")
    held = SessionsHeld(AgentId("a"), (AdoptedSession(session.session, ()),))
    assert closes(bench.tell(1, held)) == {"a": (session.session,)}
    assert bench.booked() == {}


def test_a_session_of_a_request_that_is_not_served_any_more_is_closed() -> None:
    _, session = before()
    bench = successor()
    hello(bench, 1, "a", session)
    hello(bench, 1, "b", session)
    bench.ask(2, in_flight=adopted(session), number=1)
    other = plan(chain("c", 1, 80))
    assert bench.tell(3, PlanActivated(other)) == []  # it goes on
    commands = bench.finished(4, session)
    assert closes(commands) == {"a": (session.session,), "b": (session.session,)}


def test_an_adopted_request_is_answered_at_its_deadline_like_any_other() -> None:
    _, session = before()
    bench = successor()
    hello(bench, 1, "a", session)
    hello(bench, 1, "b", session)
    bench.ask(1, budget_ms=30, in_flight=adopted(session), number=1)
    commands = bench.tick(1000)
    assert rejects(commands) == [(1, "DEADLINE_EXCEEDED")]
    assert set(closes(commands)) == {"a", "b"}


def test_a_gateway_that_comes_back_goes_on_with_the_session_it_names() -> None:
    bench, session = before()
    assert bench.ask(1, in_flight=adopted(session), number=1) == []
    assert bench.figure("arrived_requests") == 1


def test_a_gateway_that_never_heard_of_a_session_gets_another() -> None:
    bench, session = before()
    commands = bench.ask(1, number=1)
    assert started(commands) == [(1, "c")]
    assert closes(commands) == {"a": (session.session,), "b": (session.session,)}
    assert bench.figure("restarted_sessions") == 0
