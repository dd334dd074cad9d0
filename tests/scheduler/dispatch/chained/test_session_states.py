"""States change by the table only; validation finds what contradicts itself; stories say why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.sessions.validation import validate
from catenary_scheduler.dispatch.chained.states import (
    FOUND,
    LOST,
    REQUEST_TRANSITIONS,
    SESSION_TRANSITIONS,
    RequestState,
    SessionState,
)
from catenary_scheduler.dispatch.chained.tracking import Session, StoryStep
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    PlanActivated,
    RequestCancelled,
    SessionRequested,
    SessionsHeld,
    StartSession,
)
from catenary_services.domain.ids import AgentId, GatewayId, RequestId, ServerId, SessionId
from catenary_services.domain.plan import Agent
from scheduling_cases.chain_bench import LLAMA, ChainBench, adopted, chain, only, plan
from scheduling_cases.move_bench import MoveBench

A, B = AgentId("a"), AgentId("b")


def names(story: list[StoryStep]) -> list[str]:
    return [each.way.name for each in story]


def bench_of_two() -> MoveBench:
    return MoveBench(plan(chain("a", 2, 1.0), chain("b", 2, 2.0)))


# The table


def test_every_state_can_be_entered_and_left() -> None:
    for kind, transitions in (
        (RequestState, REQUEST_TRANSITIONS),
        (SessionState, SESSION_TRANSITIONS),
    ):
        states = list(kind)
        first, last = states[0], states[-1]
        assert {way.target for way in transitions} == set(states) - {first}
        assert {source for way in transitions for source in way.sources} == set(states) - {last}
        assert len({way.name for way in transitions}) == len(transitions)


def table_of(bench: ChainBench) -> SessionTable:
    return bench.dispatcher._table


def test_a_way_that_the_table_lacks_raises_in_tests() -> None:
    bench = bench_of_two()
    session = table_of(bench).sessions[bench.start(0).session]
    with pytest.raises(AssertionError, match="'found' cannot happen in the state 'starting'"):
        table_of(bench).session_goes(session, FOUND)


def test_a_way_that_the_table_lacks_is_counted_in_service() -> None:
    dispatcher = ChainedDispatcher(ChainedConfig())
    dispatcher.handle(AgentJoined(Agent(A, "x", ServerId("a"), 1, 1)), 0)
    dispatcher.handle(PlanActivated(plan(chain("a", 2, 1.0))), 0)
    request = RequestId(GatewayId("g"), 1)
    start = only(dispatcher.handle(SessionRequested(request, LLAMA, 5, 9, 10**9), 0), StartSession)
    session = dispatcher._table.sessions[start.session]
    dispatcher._table.session_goes(session, FOUND)
    assert session.state is SessionState.UNCLAIMED
    assert dispatcher.statistics()["illegal_transitions"] == 1


# Validation


def broken_session(bench: ChainBench) -> None:
    next(iter(table_of(bench).sessions.values())).state = SessionState.CLOSING


def broken_request(bench: ChainBench) -> None:
    next(iter(table_of(bench).sequences.values())).state = RequestState.WAITING


def broken_queue(bench: ChainBench) -> None:
    sequence = next(iter(table_of(bench).sequences.values()))
    table_of(bench).model_queue(LLAMA).waiting.push(sequence)


def broken_timer(bench: ChainBench) -> None:
    next(iter(table_of(bench).sequences.values())).timer = -1


def broken_book(bench: ChainBench) -> None:
    bench.book.slots.release(next(iter(table_of(bench).sessions)))


def broken_tokens(bench: ChainBench) -> None:
    table_of(bench).kv_budget.leaves(next(iter(table_of(bench).sessions)))


def broken_count(bench: ChainBench) -> None:
    table_of(bench).model_queue(LLAMA).offered[0].running += 1


def broken_claims(bench: ChainBench) -> None:
    table_of(bench).unclaimed[next(iter(table_of(bench).sessions))] = None


@pytest.mark.parametrize(
    ("breaks", "found"),
    [
        (broken_session, "is closing and its request is g/1"),
        (broken_request, "g/1 is waiting and 0 times in a queue"),
        (broken_queue, "g/1 is running and 1 times in a queue"),
        (broken_timer, "g/1 is never looked at"),
        (broken_book, "holds no slots"),
        (broken_tokens, "its tokens leave"),
        (broken_count, "2 sessions count on a, and 1 are"),
        (broken_claims, "awaits a claim"),
    ],
)
def test_validation_finds_what_contradicts_itself(
    breaks: Callable[[ChainBench], None], found: str
) -> None:
    bench = bench_of_two()
    bench.start(0)
    validate(table_of(bench))
    breaks(bench)
    with pytest.raises(AssertionError, match=found):
        validate(table_of(bench))
    with pytest.raises(AssertionError, match=found):  # and so does every event
        bench.tick(1)


# Stories


def test_a_story_tells_what_happened_to_a_request_and_why() -> None:
    bench = bench_of_two()
    first = bench.start(0)
    bench.progress(1, first, 1)
    commands = bench.fail(2, first, "a")
    second = next(each for each in commands if isinstance(each, StartSession))
    bench.progress(3, second, 2)
    bench.closed(4, "b", second)
    bench.finished(5, second)
    story = bench.dispatcher.story(first.request)
    steps = [(each.session, each.before, each.way.target, each.cause.kind) for each in story]
    assert steps == [
        (0, "new", "waiting", "SessionRequested"),
        (0, "waiting", "running", "SessionRequested"),
        (first.session, "new", "starting", "SessionRequested"),
        (first.session, "starting", "decoding", "SessionsProgressed"),
        (0, "running", "waiting", "SessionFailed"),
        (first.session, "decoding", "closing", "SessionFailed"),
        (0, "waiting", "running", "SessionFailed"),
        (second.session, "new", "starting", "SessionFailed"),
        (second.session, "starting", "decoding", "SessionsProgressed"),
        (second.session, "decoding", "delivering", "SessionsClosed"),
        (0, "running", "answered", "RequestCompleted"),
        (second.session, "delivering", "closing", "RequestCompleted"),
        (second.session, "closing", "closed", "RequestCompleted"),
    ]
    assert [each.why for each in story if each.way.name in ("placed", "session lost", "ended")] == [
        "a",
        "a: INTERNAL",
        "b",
        "b",
    ]
    moments = [(each.cause.at_ns, each.cause.number) for each in story]
    assert moments == sorted(moments)
    for session in (first.session, second.session):
        assert bench.dispatcher.story(session) == story


def test_a_command_names_the_event_that_caused_it() -> None:
    bench = bench_of_two()
    start = bench.start(0)
    story = bench.dispatcher.story(start.request)
    assert {each.cause.number for each in story} == {start.cause}
    commands = bench.tell(1, RequestCancelled(start.request))
    assert [each.cause for each in commands] == [start.cause + 1]  # type: ignore[union-attr]


def test_an_answer_to_an_order_names_the_event_that_caused_the_order() -> None:
    bench = bench_of_two()
    old = bench.running(0)
    new = bench.move(5, old, "b")
    bench.moved(6, new)
    bench.closed(7, "a", old)
    bench.progress(8, new, 3)
    (gone,) = [each for each in bench.fail(9, new, "b") if isinstance(each, StartSession)]
    bench.tell(10, RequestCancelled(old.request))
    story = bench.dispatcher.story(old.request)
    answers = {(each.session, each.way.name): each.answers for each in story}
    moved_at = next(each.cause.number for each in story if each.way.name == "moved away")
    assert answers[old.session, "first token"] == old.cause
    assert answers[new.session, "took over"] == answers[old.session, "moved away"] == new.cause
    assert answers[old.session, "released"] == moved_at
    assert answers[new.session, "first token"] == answers[0, "session lost"] == new.cause
    # What comes from outside, or follows from the same event, answers nothing.
    assert {each.answers for each in story if each.cause.kind == "RequestCancelled"} == {0}
    assert answers[old.session, "move began"] == answers[gone.session, "started"] == 0


def test_a_story_tells_of_moves() -> None:
    bench = bench_of_two()
    old = bench.running(0)
    new = bench.move(5, old, "b")
    bench.moved(6, new)
    story = bench.dispatcher.story(old.request)
    assert names(story)[-5:] == [
        "first token",
        "reserved for a move",
        "move began",
        "took over",
        "moved away",
    ]
    assert story[-1].why == f"to {new.session}"


def test_a_session_that_was_found_brings_its_story_to_its_request() -> None:
    bench = bench_of_two()
    start = bench.start(0)
    later = ChainBench(plan(chain("a", 2, 1.0), chain("b", 2, 2.0)), epoch=2, agents="")
    later.tell(1, SessionsHeld(A, (adopted(start),)))
    assert names(later.dispatcher.story(start.session)) == ["found"]
    later.ask(2, in_flight=adopted(start), number=start.request.number)
    story = later.dispatcher.story(start.request)
    assert names(story) == ["found", "adopted with its session", "claimed"]
    assert story == later.dispatcher.story(start.session)
    assert story[0].why == "on a"


def test_a_session_that_nobody_claimed_keeps_its_story() -> None:
    bench = bench_of_two()
    start = bench.start(0)
    later = ChainBench(plan(chain("a", 2, 1.0)), epoch=2, agents="")
    later.tell(1, SessionsHeld(A, (adopted(start),)))
    later.tell(2, AgentLost(A))
    assert names(later.dispatcher.story(start.session)) == ["found", "released"]


def test_stories_are_bounded() -> None:
    bench = bench_of_two()
    first = bench.start(0)
    bench.end(1, first)
    assert names(bench.dispatcher.story(first.request))[-1] == "released"
    for number in range(1024):
        bench.end(2 + number, bench.start(2 + number))
    assert bench.dispatcher.story(first.request) == []
    assert bench.dispatcher.story(first.session) == []
    assert bench.dispatcher.story(SessionId(7)) == []


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    bench = bench_of_two()
    start = bench.running(0)
    session = start
    for number in range(40):
        bench.progress(2000 + 9 * number, session, 2 + number)
        new = bench.move(2004 + 9 * number, session)
        bench.moved(2006 + 9 * number, new)
        bench.closed(2007 + 9 * number, session.chain_id, session)
        session = new
    story = bench.dispatcher.story(start.request)
    assert len(story) <= 64
    assert names(story)[:3] == ["arrived", "placed", "started"]
    assert [(each.way.name, each.why) for each in story[-2:]] == [
        ("moved away", f"to {session.session}"),
        ("released", ""),
    ]


def test_a_story_joined_with_another_stays_bounded() -> None:
    bench = bench_of_two()
    start = bench.running(0)
    table = table_of(bench)
    sequence = table.sequences[start.request]
    found = Session(SessionId(start.session + 1), None, sequence.story * 20)
    assert len(found.story) > 64
    table.assign(found, sequence)
    table.request_goes(sequence, LOST)
    story = sequence.story
    assert len(story) == 64
    assert (story[0].way.name, story[-1].way.name) == ("arrived", "session lost")
