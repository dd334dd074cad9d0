"""Sessions that move while they generate: one rule at a time, with a clock that steps."""

from __future__ import annotations

import pytest

from catenary_scheduler.dispatch.chained import ChainedConfig
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    AgentJoined,
    AgentLost,
    CloseSessions,
    PlanActivated,
    RequestCancelled,
    SessionMoved,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsHeld,
    StartSession,
)
from catenary_services.domain.ids import AgentId, ModelKey, ServerId, SessionId
from catenary_services.domain.plan import Agent
from catenary_services.errors import PartitionLost, Unavailable
from scheduling_cases.chain_bench import (
    LLAMA,
    MS,
    adopted,
    chain,
    closes,
    hop,
    only,
    plan,
    rejects,
    slots_of,
    started,
)
from scheduling_cases.move_bench import MoveBench

A, B, C = AgentId("a"), AgentId("b"), AgentId("c")
THREE = plan(chain("a", 2, 40), chain("b", 2, 50), chain("c", 1, 60))
RINGS = plan(
    chain("one", 2, 40, hop("a", 0, 2), hop("b", 2, 6)),
    chain("two", 2, 50, hop("c", 0, 2), hop("b", 2, 6)),
)


# ---- how it begins ----


def test_a_move_books_the_target_and_leaves_the_source_as_it_is() -> None:
    bench = MoveBench(RINGS)
    old = bench.running()
    new = bench.move(1, old, "two")
    assert (new.request, new.chain_id, new.moves, new.move_mode) == (
        old.request,
        "two",
        old.session,
        "kv",
    )
    assert new.session != old.session
    assert new.hops == RINGS.models[0].chains[1].hops
    # Agent b is on both chains, and holds both.
    assert bench.booked() == {"a": 2, "b": 8, "c": 2}
    assert slots_of(bench.dispatcher.snapshot(), new) == {"c": 2, "b": 4}
    assert bench.current(old) == old.session
    assert bench.figure("moving_sessions") == 1
    assert bench.figure("started_sessions") == 1


def test_where_nobody_says_where_to_the_least_loaded_chain_is_taken_and_caches_travel() -> None:
    bench = MoveBench(THREE)
    old = bench.running()
    bench.running()
    bench.running()
    assert [each.chain_id for each in bench.dispatcher.sessions()] == ["a", "a", "b"]
    new = only(bench.want(1, old, mode=None), StartSession)
    assert (new.chain_id, new.move_mode) == ("c", "kv")


def test_requests_do_not_take_slots_that_a_move_has_booked() -> None:
    bench = MoveBench(plan(chain("a", 1, 40), chain("b", 1, 50)))
    old = bench.running()
    new = bench.move(1, old)
    assert bench.ask(2) == []
    assert started(bench.moved(3, new)) == []
    assert started(bench.closed(4, "a", old)) == [(2, "a")]


@pytest.mark.parametrize(
    "case",
    [
        "unknown",
        "prompt",
        "moving",
        "there",
        "no chain",
        "full",
        "over",
        "closing",
        "gone",
    ],
)
def test_a_move_that_cannot_be_is_refused_and_only_counted(case: str) -> None:
    bench = MoveBench(THREE)
    old = bench.start(0) if case == "prompt" else bench.running()
    where, before = "b", 0
    if case == "unknown":
        old = StartSession(SessionId(5), old.request, "a", ())
    elif case == "moving":
        bench.move(1, old, "c")
    elif case in ("there", "no chain"):
        where = "a" if case == "there" else "z"
    elif case == "full":
        bench.running()
        for _ in range(2):
            bench.running()
    elif case == "over":
        bench.closed(1, "a", old)
    elif case == "closing":
        bench.finished(1, old)
    elif case == "gone":
        bench.tell(1, AgentLost(B))
    before = bench.figure("started_moves")
    problem = bench.dispatcher.problem(old.session, where)
    assert bench.want(2, old, where) == []
    assert bench.figure("refused_moves") == 1
    assert bench.figure("started_moves") == before
    assert (
        problem
        == {
            "unknown": "no request is answered by it",
            "prompt": "its prompt is not done",
            "moving": "it moves already",
            "there": "it is there already",
            "no chain": "the plan has no chain 'z' for llama:1",
            "full": "that chain has no free slot",
            "over": "it is about to end",
            "closing": "no request is answered by it",
            "gone": "that chain cannot be used at the moment",
        }[case]
    )


def test_so_many_move_at_a_time_of_one_agent_and_in_all() -> None:
    config = ChainedConfig(max_moves=3, max_moves_per_agent=2)
    wide = plan(chain("a", 4, 40), chain("b", 4, 50), chain("c", 4, 60))
    bench = MoveBench(wide, config)
    sessions = [bench.running() for _ in range(6)]
    assert [each.chain_id for each in sessions] == ["a"] * 4 + ["b"] * 2
    moves = [bench.move(1, sessions[0], "b"), bench.move(1, sessions[4], "c")]
    assert bench.want(1, sessions[5], "c") == []  # b has two already, one that comes and one goes
    assert "away from its agents" in bench.dispatcher.problem(sessions[5].session, "c")
    moves.append(bench.move(1, sessions[1], "c"))
    assert bench.want(1, sessions[2], "b") == []
    assert bench.dispatcher.problem(sessions[2].session, "b") == (
        "too many sessions move at the moment"
    )
    bench.moved(2, moves[0])
    bench.moved(2, moves[1])
    assert bench.dispatcher.problem(sessions[5].session, "c") == ""


# ---- how it ends ----


def test_a_session_that_has_moved_is_that_of_its_request_and_the_old_one_is_closed() -> None:
    bench = MoveBench(RINGS)
    old = bench.running()
    new = bench.move(1, old)
    assert closes(bench.moved(2, new)) == {"a": (old.session,), "b": (old.session,)}
    assert bench.current(old) == new.session
    view = bench.dispatcher.session_of(old.request)
    assert view is not None
    assert (view.chain_id, view.was, view.moving_to) == ("two", old.session, None)
    bench.closed(3, "a", old)
    bench.closed(3, "b", old)
    assert bench.booked() == {"c": 2, "b": 4}
    assert bench.figure("kv_moves") == 1
    assert bench.end(4, new) == []
    assert bench.booked() == {}
    assert bench.figure("completed_requests") == 1
    assert bench.figure("restarted_sessions") == 0
    assert bench.dispatcher.next_wakeup() is None


def test_it_moves_on_once_its_first_token_there_is_reported() -> None:
    bench = MoveBench(THREE)
    old = bench.running(tokens=3)
    new = bench.move(1, old, "b")
    bench.moved(2, new)
    assert bench.want(3, new, "c") == []
    bench.progress(4, old, 4)
    assert bench.move(5, new, "c").moves == new.session


def test_tokens_of_the_old_chain_that_are_reported_late_are_none_of_the_new_one() -> None:
    bench = MoveBench(THREE)
    old = bench.running(tokens=3)
    new = bench.move(1, old, "b")
    bench.moved(2, new, cached_tokens=9)  # the prompt has 5, so 5 of the answer were known
    bench.progress(3, old, 5)
    assert bench.want(4, new, "c") == []
    assert bench.dispatcher.problem(new.session, "c") == "its prompt is not done"
    bench.progress(5, old, 6)
    assert bench.move(6, new, "c").moves == new.session


def test_a_session_whose_agents_let_go_before_the_word_of_the_move_is_not_lost() -> None:
    bench = MoveBench(RINGS)
    old = bench.running()
    new = bench.move(1, old)
    assert bench.closed(2, "b", old) == []
    assert bench.closed(2, "a", old) == []
    assert bench.moved(3, new) == []
    assert bench.current(old) == new.session
    assert bench.tick(20_000) == []
    assert bench.figure("restarted_sessions") == 0


@pytest.mark.parametrize("why", ["failed", "lost", "closed", "deadline", "hello"])
def test_whatever_happens_to_what_it_is_to_become_leaves_a_session_where_it_is(why: str) -> None:
    bench = MoveBench(RINGS)
    old = bench.running()
    new = bench.move(1, old)
    commands = {
        "failed": lambda: bench.fail(2, new, "c"),
        "lost": lambda: bench.tell(2, AgentLost(C)),
        "closed": lambda: bench.closed(2, "c", new),
        "deadline": lambda: bench.tick(30_001),
        "hello": lambda: bench.tell(2, SessionsHeld(C, ())),
    }[why]()
    # The agent that leads the move is told, too.
    told = {"a": (new.session,), "b": (new.session,), "c": (new.session,)}
    if why in ("lost", "closed"):
        del told["c"]
    assert closes(commands) == told
    assert not [each for each in commands if not isinstance(each, CloseSessions)]
    reason = {"failed": "agent", "hello": "lost"}.get(why, why)
    assert bench.figure(f"failed_moves_{reason}") == bench.figure("failed_moves") == 1
    assert bench.dispatcher.move_failure(new.session) == reason
    assert bench.current(old) == old.session
    for agent in "abc":
        bench.closed(30_010, agent, new)
    assert bench.booked() == {"a": 2, "b": 4}
    assert bench.end(30_020, old) == []
    assert bench.booked() == {}


@pytest.mark.parametrize("how", ["completed", "cancelled", "failed", "lost", "deadline", "refused"])
def test_whatever_ends_a_session_closes_what_it_is_to_become(how: str) -> None:
    bench = MoveBench(THREE, agents="abc")
    old = bench.running(budget_ms=5_000)
    new = bench.move(1, old, "b")
    commands = {
        "completed": lambda: bench.finished(2, old),
        "cancelled": lambda: bench.tell(2, RequestCancelled(old.request)),
        "failed": lambda: bench.fail(2, old, "a"),
        "lost": lambda: bench.tell(2, AgentLost(A)),
        "deadline": lambda: bench.tick(5_000) + bench.tick(5_250),
        "refused": lambda: bench.fail(2, old, "a", retryable=False),
    }[how]()
    assert new.session in closes(commands)["b"]
    assert ("a" in closes(commands)) == (how != "lost")
    again = [each for each in commands if isinstance(each, StartSession)]
    if how in ("failed", "lost"):
        assert [(each.request, each.moves) for each in again] == [(old.request, None)]
    else:
        assert not again
    assert len(rejects(commands)) == (how in ("deadline", "refused"))
    assert bench.figure("failed_moves_over") == 1
    assert bench.figure("moving_sessions") == 0
    # Late news of it changes nothing.
    assert bench.moved(5_300 if how == "deadline" else 3, new) == []


def test_only_an_agent_that_could_not_be_reached_is_left_alone_after_a_failed_move() -> None:
    for reason, agent, trusted in (
        ("INTERNAL", "b", True),
        (Unavailable.reason, "b", False),
        (Unavailable.reason, "a", True),
        (Unavailable.reason, None, True),
    ):
        bench = MoveBench(plan(chain("a", 2, 40), chain("b", 2, 50)))
        old = bench.running()
        bench.fail(2, bench.move(1, old), agent, reason=reason)
        assert (bench.dispatcher.problem(old.session, "b") == "") == trusted
        assert bench.dispatcher.problem(old.session, "a") == "it is there already"


# ---- races ----


def test_a_move_done_when_it_was_given_up_already_starts_the_request_again_at_once() -> None:
    bench = MoveBench(THREE)
    old = bench.running()
    new = bench.move(1, old, "b")
    bench.fail(2, new, "b")  # it failed where it went, before the other agent's word came
    commands = bench.moved(3, new)
    (again,) = [each for each in commands if isinstance(each, StartSession)]
    assert (again.request, again.moves) == (old.request, None)
    assert closes(commands) == {"a": (old.session,)}


def test_a_move_done_that_ended_before_its_word_came_waits_for_the_gateway() -> None:
    bench = MoveBench(THREE)
    old = bench.running()
    new = bench.move(1, old, "b")
    bench.closed(2, "b", new)  # perhaps with the whole answer
    assert bench.moved(3, new) == []
    other = MoveBench(THREE)
    assert bench.finished(4, old) == [CloseSessions(A, (old.session,))]
    again = other.running()
    target = other.move(1, again, "b")
    other.closed(2, "b", target)
    other.moved(3, target)
    assert (again.request.number, "a") in started(other.tick(3_003))


def test_a_gateway_that_names_what_a_session_becomes_says_that_it_has_moved() -> None:
    bench = MoveBench(THREE)
    old = bench.running()
    new = bench.move(1, old, "b")
    commands = bench.ask(2, 100_000, in_flight=adopted(new), number=1)
    assert closes(commands) == {"a": (old.session,)}
    assert bench.current(old) == new.session
    assert bench.moved(3, new) == []


def test_a_gateway_that_has_no_token_from_there_yet_names_what_it_was() -> None:
    bench = MoveBench(THREE)
    old = bench.running()
    new = bench.move(1, old, "b")
    assert bench.ask(2, 100_000, in_flight=adopted(old), number=1) == []
    bench.moved(3, new)
    assert bench.ask(4, 100_000, in_flight=adopted(old), number=1) == []
    assert bench.current(old) == new.session
    # One that names neither heard of neither.
    assert started(bench.ask(5, 100_000, number=1)) == [(1, "a")]


def test_a_plan_without_the_target_does_not_end_a_move() -> None:
    bench = MoveBench(THREE)
    old = bench.running()
    new = bench.move(1, old, "b")
    assert bench.tell(2, PlanActivated(plan(chain("a", 2, 40), chain("c", 1, 60)))) == []
    # It has moved to where nothing should be, so it goes on from there.
    bench.moved(3, new)
    commands = bench.progress(4, old, 2)
    assert [(each.moves, each.chain_id) for each in commands if isinstance(each, StartSession)] == [
        (new.session, "c")
    ]


# ---- fail-over ----


def taken_over(
    old: StartSession, new: StartSession, *, names: StartSession | None, agents_first: bool = True
) -> MoveBench:
    """Returns the successor of a scheduler under which a move from a to b was under way."""
    bench = MoveBench(THREE, epoch=2, agents="")
    held = {A: old, B: new}

    def say_hello() -> None:
        for agent, session in held.items():
            bench.tell(0, SessionsHeld(agent, (adopted(session),)))
            bench.tell(0, AgentJoined(Agent(agent, "x", ServerId(agent), 1, 1)))

    if agents_first:
        say_hello()
    if names is not None:
        bench.tell(
            0,
            SessionRequested(
                old.request,
                LLAMA,
                5,
                10,
                100_000 * MS,
                0,
                adopted(names),
                progress=SessionProgress(old.request, 2, MS, 0),
            ),
        )
    if not agents_first:
        say_hello()
    return bench


def under_way() -> tuple[StartSession, StartSession]:
    bench = MoveBench(THREE)
    old = bench.running()
    return old, bench.move(1, old, "b")


@pytest.mark.parametrize("agents_first", [True, False])
def test_a_move_done_under_a_new_scheduler_is_taken_note_of(agents_first: bool) -> None:
    old, new = under_way()
    bench = taken_over(old, new, names=old, agents_first=agents_first)
    assert bench.current(old) == old.session
    commands = bench.moved(1, new)
    assert closes(commands) == {"a": (old.session,)}
    assert not started(commands)
    assert bench.current(old) == new.session
    bench.closed(2, "a", old)
    assert bench.tick(6_000) == bench.tick(12_000) == []  # nobody doubts it
    assert bench.booked() == {"b": 6}
    assert bench.end(12_001, new) == []
    assert bench.booked() == {}


@pytest.mark.parametrize("agents_first", [True, False])
def test_what_a_gateway_does_not_name_is_closed_when_its_time_is_over(agents_first: bool) -> None:
    old, new = under_way()
    bench = taken_over(old, new, names=new, agents_first=agents_first)
    assert bench.current(old) == new.session
    assert closes(bench.tick(5_001)) == {"a": (old.session,)}
    bench = taken_over(old, new, names=old, agents_first=agents_first)
    assert closes(bench.tick(5_001)) == {"b": (new.session,)}
    # That move may be done at this very moment: the request does not wait for what is closed.
    assert started(bench.moved(5_002, new)) == [(1, "a")]


def test_a_gateway_that_comes_after_the_word_of_a_move_is_served_by_what_it_became() -> None:
    old, new = under_way()
    bench = taken_over(old, new, names=None)
    assert closes(bench.moved(1, new)) == {"a": (old.session,)}
    assert bench.ask(2, 100_000, in_flight=adopted(old), number=1) == []
    assert bench.current(old) == new.session


def test_a_move_to_a_session_nobody_knows_starts_the_request_again() -> None:
    old, new = under_way()
    bench = taken_over(old, old, names=old)
    assert started(bench.moved(1, new)) == [(1, "a")]
    assert bench.current(old) not in (old.session, new.session)


def test_a_session_handed_over_while_nobody_led_starts_again() -> None:
    old, new = under_way()
    bench = MoveBench(THREE, epoch=2, agents="")
    bench.tell(
        0,
        SessionRequested(
            old.request,
            LLAMA,
            5,
            10,
            100_000 * MS,
            0,
            AdoptedSession(old.session, old.hops),
        ),
    )
    bench.tell(0, SessionsHeld(A, ()))  # its word of the move was for the scheduler before
    commands = bench.tell(0, AgentJoined(Agent(A, "x", ServerId("a"), 1, 1)))
    assert started(commands) == [(1, "a")]
    bench.tell(0, SessionsHeld(B, (adopted(new),)))
    assert closes(bench.tick(5_001)) == {"b": (new.session,)}


def test_views_say_what_moves_where() -> None:
    bench = MoveBench(THREE)
    old = bench.running(tokens=4)
    new = bench.move(1, old, "b")
    (view,) = bench.dispatcher.sessions()
    assert (view.session, view.moving_to, view.moving_chain, view.moving_by) == (
        old.session,
        new.session,
        "b",
        "kv",
    )
    assert (view.tokens, view.runs, view.model) == (9, True, ModelKey("llama", "1"))
    assert bench.dispatcher.view(new.session) is None
    bench.fail(2, new, reason=PartitionLost.reason)
    assert bench.dispatcher.sessions()[0].moving_to is None


def test_closing_of_unknown_sessions_changes_nothing() -> None:
    bench = MoveBench(THREE)
    old = bench.running()
    assert bench.tell(1, SessionsClosed(A, (SessionId(77),))) == []
    assert bench.tell(1, SessionMoved(SessionId(78), SessionId(77))) == []
    assert bench.current(old) == old.session
