"""Rules of the chained dispatcher, one at a time, with a clock that steps."""

from __future__ import annotations

import pytest

from catenary_scheduler.dispatch.availability import Impairment
from catenary_scheduler.dispatch.chained import ChainedConfig
from catenary_scheduler.dispatch.events import (
    AgentLost,
    Command,
    PlanActivated,
    Reject,
    RequestCancelled,
    SessionFailed,
    SessionsClosed,
    StartSession,
)
from catenary_services.domain.ids import AgentId, PlanId, SessionId
from catenary_services.domain.plan import Plan
from catenary_services.errors import InvalidInput
from scheduling_cases.chain_bench import (
    LLAMA,
    MS,
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

TWO = plan(chain("a", 2, 50), chain("b", 1, 40))
RING = plan(chain("ring", 2, 50, hop("a", 0, 2), hop("b", 2, 6)), chain("c", 1, 80))


# ---- which chain ----


def test_a_session_joins_the_fastest_free_chain() -> None:
    bench = ChainBench(TWO)
    assert [started(bench.ask(0))[0][1] for _ in range(3)] == ["b", "a", "a"]
    assert bench.booked() == {"a": 12, "b": 6}


def test_equal_chains_are_taken_in_order_of_the_plan() -> None:
    bench = ChainBench(plan(chain("b", 1, 50), chain("a", 1, 50)))
    assert [started(bench.ask(0))[0][1] for _ in range(2)] == ["b", "a"]


def test_who_finds_no_free_chain_waits_and_takes_the_slot_that_is_freed() -> None:
    bench = ChainBench(TWO)
    sessions = [bench.start(0) for _ in range(3)]
    assert bench.ask(1) == bench.ask(2) == []
    assert bench.figure("queued_requests") == 2
    assert started(bench.end(3, sessions[1])) == [(4, "a")]
    assert started(bench.end(4, sessions[0])) == [(5, "b")]


def test_priority_goes_before_arrival() -> None:
    bench = ChainBench(plan(chain("a", 1, 50)))
    first = bench.start(0)
    bench.ask(1)
    bench.ask(2, priority=1)
    bench.ask(3, priority=1)
    assert started(bench.end(4, first)) == [(3, "a")]


def test_a_slot_is_free_when_every_agent_of_the_chain_let_go() -> None:
    bench = ChainBench(plan(chain("ring", 1, 50, hop("a", 0, 2), hop("b", 2, 6))))
    first = bench.start(0)
    bench.ask(1)
    assert slots_of(bench.dispatcher.snapshot(), first) == {"a": 2, "b": 4}
    assert bench.closed(2, "b", first) == []
    assert closes(bench.finished(3, first)) == {"a": (first.session,)}
    assert bench.booked() == {"a": 2}
    assert started(bench.closed(4, "a", first)) == [(2, "ring")]


def test_a_chain_may_enter_an_agent_in_the_middle() -> None:
    bench = ChainBench(
        plan(
            chain("whole", 1, 50, hop("a", 0, 6)),
            chain("part", 1, 60, hop("b", 0, 4), hop("a", 0, 6, entry=4)),
            a=8,
        )
    )
    bench.ask(0)
    part = bench.start(0)
    assert slots_of(bench.dispatcher.snapshot(), part) == {"a": 2, "b": 4}
    assert bench.booked() == {"a": 8, "b": 4}


def test_slots_in_the_book_bound_a_chain_as_its_capacity_does() -> None:
    bench = ChainBench(plan(chain("a", 3, 50), chain("b", 1, 60), a=12))
    assert [started(bench.ask(0)) for _ in range(4)] == [[(1, "a")], [(2, "a")], [(3, "b")], []]


# ---- how a request ends ----


def test_the_end_of_a_request_closes_what_is_left_of_its_session() -> None:
    bench = ChainBench(RING)
    session = bench.start(0)
    commands = bench.finished(1, session)
    assert closes(commands) == {"a": (session.session,), "b": (session.session,)}
    assert bench.booked() == {"a": 2, "b": 4}
    bench.closed(2, "a", session)
    bench.closed(2, "b", session)
    assert bench.booked() == {}
    assert bench.dispatcher.next_wakeup() is None


def test_a_cancelled_request_closes_its_session_and_leaves_the_queue() -> None:
    bench = ChainBench(plan(chain("a", 1, 50)))
    first = bench.start(0)
    bench.ask(0)
    assert bench.tell(1, RequestCancelled(first.request._replace(number=2))) == []
    assert bench.figure("queued_requests") == 0
    assert closes(bench.tell(1, RequestCancelled(first.request))) == {"a": (first.session,)}
    assert bench.tell(1, RequestCancelled(first.request)) == []


def test_a_deadline_that_passes_in_the_queue_is_answered() -> None:
    bench = ChainBench(plan(chain("a", 1, 50)))
    bench.start(0)
    bench.ask(0, budget_ms=20)
    assert bench.tick(19) == []
    assert bench.dispatcher.next_wakeup() == 20 * MS
    refusal = only(bench.tick(20), Reject)
    assert (refusal.reason, refusal.details) == ("DEADLINE_EXCEEDED", {"stage": "queue"})


def test_a_session_that_outlives_its_deadline_is_closed_and_its_request_answered() -> None:
    bench = ChainBench(RING, ChainedConfig(deadline_grace_ns=5 * MS))
    session = bench.start(0, budget_ms=20)
    assert bench.tick(20) == bench.tick(24) == []
    commands = bench.tick(25)
    assert rejects(commands) == [(1, "DEADLINE_EXCEEDED")]
    assert closes(commands) == {"a": (session.session,), "b": (session.session,)}


def test_an_agent_is_told_again_to_close_and_at_last_written_off() -> None:
    config = ChainedConfig(close_patience_ns=10 * MS, close_attempts=3)
    bench = ChainBench(plan(chain("a", 1, 50)), config)
    session = bench.start(0)
    bench.ask(0)
    assert closes(bench.finished(1, session)) == {"a": (session.session,)}
    told, began = [], []
    for at in range(2, 60):
        commands = bench.tick(at)
        told += [at] if closes(commands) else []
        began += [at] if started(commands) else []
    assert (told, began) == ([11, 21], [31])
    assert bench.figure("abandoned_sessions") == 1


def test_a_queue_that_is_full_says_when_it_should_have_drained() -> None:
    bench = ChainBench(plan(chain("a", 1, 50)), ChainedConfig(max_queued=2, retry_after_ns=MS))
    session = bench.start(0)
    bench.ask(0)
    bench.ask(0)
    refusal = only(bench.ask(0), Reject)
    assert (refusal.reason, refusal.retry_after_ns) == ("OVERLOADED", 2 * 50 * MS)
    at = 0
    for _ in range(100):  # sessions that take 10 ms, not 50
        at += 10
        (session,) = [c for c in bench.end(at, session) if isinstance(c, StartSession)]
        bench.ask(at, budget_ms=10_000)
    refusal = only(bench.ask(at), Reject)
    assert refusal.retry_after_ns == pytest.approx(2 * 10 * MS, rel=0.05)


def test_more_tokens_than_a_session_has_are_refused() -> None:
    bench = ChainBench(plan(chain("a", 1, 50), session_tokens=20))
    assert rejects(bench.ask(0, tokens=16)) == [(1, "INVALID_INPUT")]
    assert rejects(bench.ask(0, tokens=0)) == [(2, "INVALID_INPUT")]
    assert started(bench.ask(0, tokens=15)) == [(3, "a")]


def test_a_request_after_its_deadline_is_refused() -> None:
    assert rejects(ChainBench(TWO).ask(0, budget_ms=0)) == [(1, "DEADLINE_EXCEEDED")]


def test_without_a_plan_requests_wait_for_one_until_their_deadline() -> None:
    bench = ChainBench(None)
    bench.ask(0, budget_ms=20)
    bench.ask(0, budget_ms=30)
    assert rejects(bench.tick(20)) == [(1, "NO_ACTIVE_PLAN")]
    assert started(bench.tell(21, PlanActivated(TWO))) == [(2, "b")]


def test_without_agents_a_chain_is_not_used() -> None:
    bench = ChainBench(RING, agents="a")
    bench.ask(0, budget_ms=20)
    bench.ask(0, budget_ms=30)
    assert rejects(bench.tick(20)) == [(1, "UNAVAILABLE")]
    assert started(bench.join(21, "b")) == [(2, "ring")]


# ---- loss ----


def test_a_session_whose_agent_is_lost_goes_on_at_the_head_of_the_queue() -> None:
    bench = ChainBench(RING)
    first, second, third = (bench.start(0) for _ in range(3))
    bench.ask(1, priority=9)
    commands = bench.tell(2, AgentLost(AgentId("b")))
    assert closes(commands)["a"] == (first.session, second.session)
    assert started(commands) == []
    assert bench.booked() == {"a": 4, "c": 6}  # until a has answered
    assert started(bench.end(3, third)) == [(1, "c")]
    assert bench.figure("restarted_sessions") == 2


def test_a_new_session_has_a_new_id_and_words_about_the_old_one_change_nothing() -> None:
    bench = ChainBench(plan(chain("a", 1, 50), chain("b", 1, 60)))
    old = bench.start(0)
    commands = bench.tell(1, AgentLost(AgentId("a")))
    (new,) = [c for c in commands if isinstance(c, StartSession)]
    assert (new.request, new.chain_id) == (old.request, "b")
    assert new.session > old.session
    assert bench.tell(2, SessionFailed(old.session, None, "INTERNAL", "late", True)) == []
    assert bench.closed(2, "a", old) == []
    assert bench.booked() == {"b": 6}


def test_a_failed_session_is_started_elsewhere_and_the_agent_left_alone_for_a_while() -> None:
    config = ChainedConfig(suspicion_ns=10 * MS)
    bench = ChainBench(RING, config)
    session = bench.start(0)
    # "b" could not be reached: chains through it are left alone, though they are faster.
    failure = SessionFailed(session.session, AgentId("b"), "PARTITION_LOST", "no", True)
    commands = bench.tell(1, failure)
    assert started(commands) == [(1, "c")]
    assert closes(commands) == {"a": (session.session,), "b": (session.session,)}
    assert bench.ask(2) == []
    assert bench.dispatcher.next_wakeup() == 11 * MS
    assert started(bench.tick(11)) == [(2, "ring")]


def test_a_gateway_that_finds_no_way_in_has_the_first_agent_left_alone() -> None:
    bench = ChainBench(RING)
    session = bench.start(0)
    failure = SessionFailed(session.session, None, "UNAVAILABLE", "no", True)
    assert started(bench.tell(1, failure)) == [(1, "c")]


def lost_between(
    bench: ChainBench, at: int, session: StartSession, one: str, other: str
) -> list[Command]:
    """One agent says that frames to the other may not have arrived."""
    return bench.tell(
        at,
        SessionFailed(
            session.session,
            AgentId(other),
            "PARTITION_LOST",
            "nothing was acknowledged",
            True,
            AgentId(one),
        ),
    )


def test_a_link_that_lost_frames_is_left_alone_for_longer_than_its_agents() -> None:
    config = ChainedConfig(suspicion_ns=10 * MS, link_suspicion_ns=100 * MS)
    others = plan(
        chain("cut", 2, 50, hop("a", 0, 2), hop("b", 2, 6)),
        chain("from a", 1, 70, hop("a", 0, 2), hop("c", 2, 6)),
        chain("to b", 2, 60, hop("d", 0, 2), hop("b", 2, 6)),
    )
    bench = ChainBench(others, config)
    session = bench.start(0)
    assert session.chain_id == "cut"
    # While b, which was not reached, is suspected, what does without it is preferred.
    assert started(lost_between(bench, 1, session, "a", "b")) == [(1, "from a")]
    # Then both agents serve as before, with others.
    assert started(bench.ask(20)) == [(2, "to b")]
    assert started(bench.ask(90)) == [(3, "to b")]
    assert started(bench.ask(102)) == [(4, "cut")]


def test_the_way_back_to_the_first_agent_is_a_link_too() -> None:
    config = ChainedConfig(suspicion_ns=10 * MS, link_suspicion_ns=100 * MS)
    three = chain("ring", 2, 50, hop("a", 0, 2), hop("b", 2, 4), hop("c", 4, 6))
    bench = ChainBench(plan(three, chain("d", 2, 80)), config)
    assert started(lost_between(bench, 1, bench.start(0), "c", "a")) == [(1, "d")]
    assert started(bench.ask(20)) == [(2, "d")]
    assert started(bench.ask(102)) == [(3, "ring")]


def test_an_agent_that_cannot_reach_a_gateway_is_left_alone_and_not_the_gateway() -> None:
    bench = ChainBench(RING, ChainedConfig(suspicion_ns=10 * MS))
    assert started(lost_between(bench, 1, bench.start(0), "b", "gateway-0")) == [(1, "c")]
    assert bench.availability.mark_of(AgentId("b"), Impairment.SUSPECTED) is not None
    assert bench.availability.mark_of(AgentId("gateway-0"), Impairment.SUSPECTED) is None


def test_where_every_chain_has_failed_a_client_is_told_while_it_can_ask_again() -> None:
    config = ChainedConfig(
        suspicion_ns=10 * MS, link_suspicion_ns=300 * MS, last_try_ns=400 * MS, max_restarts=100
    )
    bench = ChainBench(plan(chain("ring", 4, 50, hop("a", 0, 2), hop("b", 2, 6))), config)
    first = bench.start(0)
    assert not started(lost_between(bench, 100, first, "a", "b"))
    [again] = [each for each in bench.tick(400) if isinstance(each, StartSession)]
    commands = lost_between(bench, 600, again, "a", "b")
    assert not started(commands)
    assert not rejects(commands)
    # A quarter of its time is less than `last_try_ns`.
    assert rejects(bench.tick(749)) == []
    assert rejects(bench.tick(750)) == [(1, "PARTITION_LOST")]


def test_a_request_that_found_a_chain_again_has_all_of_its_time() -> None:
    config = ChainedConfig(suspicion_ns=10 * MS, link_suspicion_ns=100 * MS)
    bench = ChainBench(plan(chain("ring", 4, 50, hop("a", 0, 2), hop("b", 2, 6))), config)
    lost_between(bench, 100, bench.start(0), "a", "b")
    assert started(bench.tick(200)) == [(1, "ring")]
    assert rejects(bench.tick(750)) == rejects(bench.tick(999)) == []
    assert bench.figure("open_requests") == 1


def test_suspicion_grows_with_failures_in_a_row_and_ends_with_a_success() -> None:
    config = ChainedConfig(suspicion_ns=10 * MS, longest_suspicion_ns=30 * MS)
    bench = ChainBench(plan(chain("a", 1, 50)), config)
    at, pauses = 0, []
    session = bench.start(0, budget_ms=10_000)
    for _ in range(4):
        bench.tell(at, SessionFailed(session.session, AgentId("a"), "INTERNAL", "no", True))
        bench.closed(at, "a", session)
        until = bench.dispatcher.next_wakeup()
        assert until is not None
        pauses.append(until // MS - at)
        at = until // MS
        session = only(bench.tick(at), StartSession)
    assert pauses == [10, 20, 30, 30]
    bench.end(at, session)
    session = bench.start(at)
    bench.tell(at, SessionFailed(session.session, AgentId("a"), "INTERNAL", "no", True))
    assert bench.dispatcher.next_wakeup() == (at + 10) * MS


def test_a_failure_that_would_come_again_is_the_answer() -> None:
    bench = ChainBench(TWO)
    session = bench.start(0)
    commands = bench.tell(1, SessionFailed(session.session, None, "INVALID_INPUT", "no", False))
    assert rejects(commands) == [(1, "INVALID_INPUT")]
    assert closes(commands) == {"b": (session.session,)}


def test_a_request_is_started_again_only_so_often() -> None:
    bench = ChainBench(plan(chain("a", 1, 50)), ChainedConfig(max_restarts=2))
    bench.start(0)
    for at in (1, 2):
        bench.tell(at, AgentLost(AgentId("a")))
        assert started(bench.join(at, "a")) == [(1, "a")]
    assert rejects(bench.tell(3, AgentLost(AgentId("a")))) == [(1, "PARTITION_LOST")]


def test_a_session_that_ended_without_the_gateway_hearing_of_it_is_started_again() -> None:
    bench = ChainBench(RING, ChainedConfig(delivery_grace_ns=5 * MS))
    session = bench.start(0)
    bench.closed(1, "b", session)
    assert bench.dispatcher.next_wakeup() == 6 * MS
    assert bench.tick(5) == []
    commands = bench.tick(6)
    assert started(commands) == [(1, "ring")]
    assert closes(commands) == {"a": (session.session,)}
    assert bench.figure("undelivered_sessions") == 1


def test_an_agent_that_comes_back_holds_nothing() -> None:
    bench = ChainBench(plan(chain("a", 1, 50), chain("b", 1, 60)))
    bench.start(0)
    bench.tell(1, AgentLost(AgentId("a")))
    bench.join(2, "a")
    assert bench.booked() == {"b": 6}
    assert started(bench.ask(3)) == [(2, "a")]


def test_unknown_sessions_and_requests_are_no_trouble() -> None:
    bench = ChainBench(TWO)
    assert bench.tell(1, SessionsClosed(AgentId("x"), (SessionId(5),))) == []
    assert bench.tell(1, SessionFailed(SessionId(5), None, "INTERNAL", "", True)) == []
    assert bench.tell(1, AgentLost(AgentId("x"))) == []


# ---- change of plan ----


def test_sessions_of_an_old_plan_go_on_and_keep_their_slots() -> None:
    bench = ChainBench(plan(chain("old", 1, 50, hop("a", 0, 6)), a=8))
    session = bench.start(0)
    after = plan(chain("ring", 2, 20, hop("b", 0, 2), hop("a", 0, 6, entry=2)), a=8)
    assert bench.tell(1, PlanActivated(after)) == []
    assert bench.ask(2) == []  # 6 of 8 slots are still the old session's
    assert started(bench.end(3, session)) == [(2, "ring")]
    assert bench.booked() == {"a": 4, "b": 2}


def test_a_chain_that_stays_keeps_count_of_its_sessions() -> None:
    bench = ChainBench(plan(chain("a", 2, 50), a=100))
    first = bench.start(0)
    bench.start(0)
    bench.tell(1, PlanActivated(plan(chain("renamed", 2, 50, hop("a", 0, 6)), a=100)))
    assert bench.ask(2) == []
    assert started(bench.end(3, first)) == [(3, "renamed")]


def test_a_plan_with_fewer_slots_starts_nothing_until_enough_are_free() -> None:
    bench = ChainBench(plan(chain("a", 3, 50)))
    sessions = [bench.start(0) for _ in range(3)]
    bench.tell(1, PlanActivated(plan(chain("a", 1, 50))))
    bench.ask(2)
    assert bench.end(3, sessions[0]) == []
    assert bench.end(3, sessions[1]) == []
    assert started(bench.end(4, sessions[2])) == [(4, "a")]


def test_a_model_no_plan_serves_any_more_is_refused() -> None:
    bench = ChainBench(plan(chain("a", 1, 50)))
    session = bench.start(0)
    bench.ask(1)
    assert rejects(bench.tell(2, PlanActivated(Plan(PlanId("q"), ())))) == [(2, "NO_ACTIVE_PLAN")]
    assert rejects(bench.ask(3)) == [(3, "NO_ACTIVE_PLAN")]
    bench.end(4, session)  # what runs goes on
    assert bench.figure("completed_requests") == 1
    assert bench.booked() == {}
    assert bench.book.slots.caches()[0].partition.model == LLAMA


# ---- observation ----


def test_statistics_tell_what_is_booked() -> None:
    bench = ChainBench(RING, stopwatch=iter(range(0, 100, 7)).__next__)
    bench.ask(0)
    figures = bench.dispatcher.statistics()
    assert (figures["booked_slots"], figures["block_slots"]) == (6, 18)
    assert (figures["booked_sessions"], figures["usable_chains"]) == (1, 2)
    assert bench.dispatcher.take_decision_times() == [7]
    assert bench.dispatcher.take_decision_times() == []


def test_a_policy_must_exist() -> None:
    with pytest.raises(InvalidInput, match="one of jffc"):
        ChainBench(TWO, policy="fastest")
    with pytest.raises(InvalidInput, match="one of jffc, slo, least-time, sa-jsq"):
        ChainBench(TWO, policy="fastest", random_below=lambda n: 0)
