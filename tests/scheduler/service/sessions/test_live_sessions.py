from __future__ import annotations

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.book import Book, SlotClaims
from catenary_scheduler.dispatch.events import StartSession
from catenary_scheduler.inflight.session_hops import SessionHops
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.planning import parse_placement
from catenary_scheduler.storage.journal import Journal
from catenary_scheduler.storage.keys import RedisTable
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    RequestId,
    SessionId,
)
from catenary_services.domain.plan import ChainHop
from scheduling_cases.stored_tables import stored_of

LLM = ModelKey("llm:x", "1")
A, B = AgentId("a"), AgentId("b")
FIRST, SECOND = PartitionKey(LLM, 0, 4), PartitionKey(LLM, 2, 6)
HOPS = (ChainHop(A, FIRST, 0, 4), ChainHop(B, SECOND, 4, 6))
START = StartSession(SessionId(7), RequestId(GatewayId("g"), 1), "llm:x:1/0", HOPS)


def booked(book: Book) -> None:
    caches = tuple(book.slots.cache(hop.agent, hop.partition) for hop in HOPS)
    for cache in caches:
        cache.capacity = 10
    book.slots.reserve(START.session, SlotClaims(caches, (4, 2)), 0, 10**12)


def test_a_session_is_there_until_the_book_has_nothing_of_it() -> None:
    book = Book()
    live = LiveSessions(book.slots)
    booked(book)
    live.started(START)
    assert live.uses_agent(A)
    assert live.uses_partition(B, SECOND)
    assert not live.uses_partition(B, FIRST)
    assert live.using(A, FIRST) == [7]
    assert (live.by_chain()["llm:x:1/0"], live.by_model()[LLM]) == (1, 1)
    book.slots.release(START.session, A)
    live.may_be_over([START.session])
    assert START.session in live
    assert not live.uses_agent(A)
    book.slots.release(START.session)
    live.tick(0)
    assert len(live) == 0


def test_a_session_of_two_chains_counts_on_the_first_until_it_is_handed_over() -> None:
    book = Book()
    live = LiveSessions(book.slots)
    booked(book)
    name = "llm:x:1/0+llm:x:1/2"
    live.started(StartSession(START.session, START.request, name, HOPS[:1], HOPS[1:]))
    assert live.by_chain() == {"llm:x:1/0": 1, "llm:x:1/2": 1}
    assert live.using(A, FIRST) == live.using(B, SECOND) == [7]
    book.slots.release(START.session, A)
    assert live.by_chain() == {"llm:x:1/2": 1}
    assert live.by_model() == {LLM: 1}


def test_what_redis_is_told_tells_a_successor_the_partitions() -> None:
    book, journal = Book(), Journal()
    live = LiveSessions(book.slots)
    booked(book)
    live.started(START)
    live.collect(journal)
    written = journal.take().tables[RedisTable.SESSIONS]
    assert written == live.records()
    again = LiveSessions(Book().slots)
    odd = {"8": "nonsense", "9": "{}", "10": '{"hops": [[1]]}'}
    again.restore(stored_of(RedisTable.SESSIONS, {**written, **odd}))
    assert again.remembered(START.session) == HOPS
    assert again.remembered(SessionId(8)) == ()
    book.slots.release(START.session)
    live.tick(0)
    live.collect(journal)
    assert journal.take().tables[RedisTable.SESSIONS] == {"7": None}


def wire(agent: str, first: int, last: int) -> common_pb2.Hop:
    return common_pb2.Hop(
        agent_id=agent, model=LLM.name, model_version="1", first_block=first, last_block=last
    )


def test_the_partition_behind_a_hop_is_found_in_redis_in_the_plan_or_guessed() -> None:
    chain = {
        "capacity": 1,
        "hops": [{"agent": "a", "blocks": [0, 4]}, {"agent": "b", "blocks": [2, 6], "entry": 4}],
    }
    placement = parse_placement({"models": [{"name": LLM.name, "chains": [chain]}]})
    route = [wire("a", 0, 4), wire("b", 4, 6)]
    live = LiveSessions(Book().slots)
    routes = SessionHops(live, {})
    assert routes.hops(START.session, route, placement) == HOPS
    guessed = routes.hops(START.session, [wire("b", 5, 7)], placement)
    assert guessed == (ChainHop(B, PartitionKey(LLM, 5, 7), 5, 7),)
    donor_book = Book()
    donor = LiveSessions(donor_book.slots)
    booked(donor_book)
    donor.started(START)
    live.restore(stored_of(RedisTable.SESSIONS, donor.records()))
    assert (
        routes.hops(
            START.session,
            route,
            parse_placement({"models": [{"name": "other", "chains": [chain]}]}),
        )
        == HOPS
    )


def test_a_request_whose_session_moves_has_two_and_counts_once() -> None:
    book = Book()
    live = LiveSessions(book.slots)
    booked(book)
    live.started(START)
    moved = SessionId(8)
    hops = HOPS[:1]
    cache = book.slots.cache(A, FIRST)
    book.slots.reserve(moved, SlotClaims((cache,), (4,)), 0, 10**12)
    live.started(StartSession(moved, START.request, "llm:x:1/1", hops, moves=START.session))
    assert live.by_model() == {LLM: 1}
    assert live.by_chain() == {"llm:x:1/0": 1, "llm:x:1/1": 1}
    assert live.using(A, FIRST) == [7, 8]
    assert {name: '"g/1"' in str(text) for name, text in live.records().items()} == {
        "7": True,
        "8": True,
    }
    book.slots.release(START.session)
    live.may_be_over([START.session])
    assert live.by_chain() == {"llm:x:1/1": 1}
