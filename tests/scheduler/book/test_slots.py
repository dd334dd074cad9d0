"""Cache slots of the book: the verbs, one at a time."""

from __future__ import annotations

import pytest

from catenary_scheduler.book import Book, Cache, Reservation, SlotClaims, SlotLedger, cache_of
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    ModelKey,
    PartitionKey,
    ResourceId,
    SessionId,
)
from catenary_services.errors import InternalError

MODEL = ModelKey("org/llama", "1.2")
A, B = AgentId("a"), AgentId("b")
S1, S2, S3 = SessionId(1), SessionId(2), SessionId(3)


def ledger(*capacities: int) -> tuple[SlotLedger, list[Cache]]:
    slots = SlotLedger()
    caches = []
    for agent, capacity in zip("abcdef", capacities, strict=False):
        cache = slots.cache(AgentId(agent), PartitionKey(MODEL, 0, 4))
        cache.capacity = capacity
        caches.append(cache)
    return slots, caches


def test_a_resource_names_agent_model_and_blocks() -> None:
    assert cache_of(A, PartitionKey(MODEL, 2, 9)) == "cache/a/org/llama:1.2[2,9)"


def test_a_reservation_takes_slots_in_every_cache() -> None:
    slots, (a, b) = ledger(5, 3)
    slots.reserve(S1, SlotClaims((a, b), (4, 2)), 10, 100)
    assert (a.used, b.used) == (4, 2)
    assert S1 in slots
    assert slots.agents(S1) == [A, B]
    assert [
        (r.session, r.resource, r.slots, r.start_ns, r.expires_ns) for r in slots.snapshot()
    ] == [
        (S1, a.resource, 4, 10, 100),
        (S1, b.resource, 2, 10, 100),
    ]


def test_probe_names_the_first_cache_that_lacks_slots_and_books_nothing() -> None:
    slots, (a, b) = ledger(5, 3)
    assert slots.probe(SlotClaims((a, b), (5, 3))) is None
    assert slots.probe(SlotClaims((a, b), (5, 4))) is b
    assert slots.probe(SlotClaims((a, b), (6, 4))) is a
    assert (a.used, b.used, len(slots)) == (0, 0, 0)


def test_a_cache_is_never_reserved_beyond_its_capacity() -> None:
    slots, (a, b) = ledger(5, 3)
    slots.reserve(S1, SlotClaims((a, b), (2, 2)), 0, 100)
    with pytest.raises(InternalError, match="too few slots in cache/b"):
        slots.reserve(S2, SlotClaims((a, b), (2, 2)), 0, 100)
    assert (a.used, b.used) == (2, 2)
    assert S2 not in slots


def test_a_session_has_one_reservation() -> None:
    slots, (a,) = ledger(5)
    slots.reserve(S1, SlotClaims((a,), (1,)), 0, 100)
    with pytest.raises(InternalError, match="already"):
        slots.reserve(S1, SlotClaims((a,), (1,)), 0, 100)
    assert a.used == 1


def test_agents_let_go_one_after_the_other() -> None:
    slots, (a, b) = ledger(5, 3)
    slots.reserve(S1, SlotClaims((a, b), (4, 2)), 0, 100)
    assert slots.release(S1, B) == [b]
    assert slots.release(S1, B) == []
    assert (a.used, b.used) == (4, 0)
    assert slots.agents(S1) == [A]
    assert slots.release(S1) == [a]
    assert S1 not in slots
    assert slots.release(S1) == []


def test_what_is_not_confirmed_expires() -> None:
    slots, (a,) = ledger(5)
    for session, expiry in ((S1, 100), (S2, 50), (S3, 60)):
        slots.reserve(session, SlotClaims((a,), (1,)), 0, expiry)
    slots.confirm(S2, 150)
    slots.confirm(S1, 90)  # never earlier
    assert slots.next_expiry() == 60
    assert slots.overdue(100) == [S3, S1]
    assert slots.expire(99) == [S3]
    assert slots.expire(100) == [S1]
    assert slots.expire(149) == []
    assert a.used == 1
    assert slots.expire(150) == [S2]
    assert (a.used, slots.next_expiry()) == (0, None)


def test_an_expiry_may_be_put_forward_once_the_end_was_ordered() -> None:
    slots, (a,) = ledger(5)
    slots.reserve(S1, SlotClaims((a,), (1,)), 0, 100)
    slots.expire_at(S1, 40)
    assert (slots.next_expiry(), slots.expire(39), slots.expire(40)) == (40, [], [S1])


def test_a_correction_enters_what_is_really_held_even_without_room() -> None:
    slots, (a, b) = ledger(5, 0)
    slots.correct(S1, a, 3, 0, 100)
    slots.correct(S1, b, 2, 0, 100)
    slots.correct(S1, a, 4, 0, 100)
    assert (a.used, b.used) == (4, 2)
    assert slots.probe(SlotClaims((b,), (0,))) is b
    slots.correct(S1, b, 0, 0, 100)
    assert (a.used, b.used) == (4, 0)
    slots.correct(S1, a, 0, 0, 100)
    assert S1 not in slots
    slots.correct(S2, a, 0, 0, 100)
    assert S2 not in slots


def test_a_released_cache_can_be_corrected_back() -> None:
    slots, (a, b) = ledger(5, 5)
    slots.reserve(S1, SlotClaims((a, b), (4, 2)), 0, 100)
    slots.release(S1, A)
    slots.correct(S1, a, 4, 0, 100)
    assert (a.used, b.used) == (4, 2)
    assert slots.release(S1) == [a, b]
    assert (a.used, b.used) == (0, 0)


def test_a_plan_that_takes_slots_away_harms_no_session() -> None:
    slots, (a,) = ledger(5)
    slots.reserve(S1, SlotClaims((a,), (4,)), 0, 100)
    a.capacity = 2
    assert slots.probe(SlotClaims((a,), (1,))) is a
    slots.release(S1)
    assert slots.probe(SlotClaims((a,), (2,))) is None


def test_caches_without_capacity_and_sessions_are_forgotten() -> None:
    slots, (a, b) = ledger(5, 5)
    slots.reserve(S1, SlotClaims((a,), (1,)), 0, 100)
    a.capacity = b.capacity = 0
    slots.forget_unused()
    assert slots.caches() == [a]
    slots.release(S1)
    slots.forget_unused()
    assert slots.caches() == []


def test_expiries_of_ended_sessions_do_not_pile_up() -> None:
    slots, (a,) = ledger(1)
    for number in range(1, 2000):
        slots.reserve(SessionId(number), SlotClaims((a,), (1,)), number, 10**9)
        slots.release(SessionId(number))
    assert len(slots._expiries) < 100


def test_the_journal_tells_each_change_once_and_nothing_of_what_came_and_went() -> None:
    book = Book()
    a = book.slots.cache(A, PartitionKey(MODEL, 0, 4))
    a.capacity = 5
    book.slots.reserve(S1, SlotClaims((a,), (4,)), 0, 100)
    book.slots.release(S1)
    assert book.take_changes() == []
    book.slots.reserve(S2, SlotClaims((a,), (4,)), 0, 100)
    (put,) = book.take_changes()
    assert (put.op, put.reservation.session, put.reservation.slots) == ("put", S2, 4)
    assert book.take_changes() == []
    book.slots.confirm(S2, 200)
    (put,) = book.take_changes()
    assert put.reservation.expires_ns == 200
    book.slots.release(S2)
    (delete,) = book.take_changes()
    assert (delete.op, delete.reservation.resource) == ("delete", a.resource)


def test_equal_numbers_of_a_batch_and_a_session_mean_nothing() -> None:
    book = Book()
    a = book.slots.cache(A, PartitionKey(MODEL, 0, 4))
    a.capacity = 5
    book.restore([Reservation(BatchId(1), 0, ResourceId("gpu/a"), 0, 10, 100)])
    book.slots.reserve(S1, SlotClaims((a,), (4,)), 0, 100)
    assert len(book) == 1
    assert len(book.snapshot()) == 2
    book.release(BatchId(1))
    assert S1 in book.slots
    assert [r.session for r in book.snapshot()] == [S1]


def test_a_successor_has_the_same_slots() -> None:
    book, other = Book(), Book()
    a, b = (book.slots.cache(agent, PartitionKey(MODEL, 0, 4)) for agent in (A, B))
    a.capacity = b.capacity = 9
    book.slots.reserve(S1, SlotClaims((a, b), (4, 2)), 5, 100)
    book.slots.reserve(S2, SlotClaims((a, b), (4, 2)), 6, 90)
    book.slots.release(S2, A)
    other.restore(reversed(book.snapshot()))
    assert set(other.snapshot()) == set(book.snapshot())
    assert other.slots.agents(S2) == [B]
    assert other.slots.next_expiry() == 90
    assert {c.resource: c.used for c in other.slots.caches()} == {a.resource: 4, b.resource: 4}
    other.restore(book.snapshot())  # known already
    assert set(other.snapshot()) == set(book.snapshot())


def test_a_resource_that_is_no_cache_is_not_restored() -> None:
    slots = SlotLedger()
    odd = Reservation(BatchId(0), 0, ResourceId("cache/a"), 0, 9, 9, slots=2, session=S1)
    slots.restore([odd])
    assert len(slots) == 0
