from __future__ import annotations

from redis.asyncio import Redis

from catenary_scheduler.book import Book, Claims, Reservation
from catenary_scheduler.dispatch.events import AgentJoined, PlanActivated, RequestArrived
from catenary_scheduler.dispatch.pooled.dispatcher import PooledDispatcher
from catenary_scheduler.storage.journal import Changes, Journal
from catenary_scheduler.storage.keys import Keys
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.store import Store
from catenary_scheduler.storage.values.records import shifted, tables_of, write_reservations
from catenary_scheduler.storage.values.tables import book_shape, read_table
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ResourceId,
    ServerId,
    SessionId,
)
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline, Plan, Stage

MODEL = ModelKey("toy", "1")
AGENTS = tuple(AgentId(f"agent-{i}") for i in range(3))


def busy_dispatcher(now: int) -> PooledDispatcher:
    dispatcher = PooledDispatcher(first_batch=1 << 40)
    for agent in AGENTS:
        dispatcher.handle(AgentJoined(Agent(agent, "cpu", ServerId(agent), 1, 10**9)), now)
    stages = (
        Stage(PartitionKey(MODEL, 0, 2), AGENTS[:1], (4_000_000,), 0),
        Stage(PartitionKey(MODEL, 2, 4), AGENTS[1:], (5_000_000,), 100_000),
    )
    pipelines = (Pipeline("toy/0", 1, stages),)
    plan = Plan(PlanId("p"), (ModelPlan(MODEL, 10**9, pipelines),))
    dispatcher.handle(PlanActivated(plan), now)
    for number in range(6):
        request = RequestId(GatewayId("g"), number)
        dispatcher.handle(RequestArrived(request, MODEL, 1, now + 10**9), now)
    return dispatcher


def identity(reservations: list[Reservation]) -> set[tuple[object, ...]]:
    return {(r.batch, r.position, r.resource, r.start_ns, r.end_ns, r.done) for r in reservations}


async def test_a_successor_has_the_same_book(redis: Redis) -> None:
    keys = Keys("test")
    lease, store, journal = Lease(redis, keys, "a", 60.0), Store(redis, keys), Journal()
    assert await lease.try_acquire()
    dispatcher = busy_dispatcher(now=10**9)
    write_reservations(journal, dispatcher.take_changes())
    await store.apply(lease, journal.take())
    stored = await Store(redis, keys).load()
    successor = PooledDispatcher(first_batch=2 << 40)
    successor.restore(shifted(stored.book, 0))
    assert len(dispatcher.snapshot()) > 3
    assert identity(successor.snapshot()) == identity(dispatcher.snapshot())


async def test_a_snapshot_says_the_same_as_the_changes(redis: Redis) -> None:
    keys = Keys("test")
    lease, store = Lease(redis, keys, "a", 60.0), Store(redis, keys)
    assert await lease.try_acquire()
    dispatcher = busy_dispatcher(now=10**9)
    await store.apply(lease, Changes(tables_of(dispatcher.snapshot()), replace=True))
    later = shifted((await store.load()).book, 500)
    back = [
        Reservation(
            r.batch,
            r.position,
            r.resource,
            r.start_ns - 500,
            r.end_ns - 500,
            r.expires_ns - 500,
            r.done,
        )
        for r in later
    ]
    assert set(back) == set(dispatcher.snapshot())


def test_an_unreadable_reservation_is_left_out() -> None:
    gpu = ResourceId("gpu/a")
    raw = {b"1:0": b"1 2 3 0", b"nonsense": b"1 2 3 0", b"2:0": b"1 2", b"3:0": b"9 2 3 0"}
    found, damaged = read_table("book:gpu/a", book_shape(gpu), raw)
    assert list(found.values()) == [Reservation(BatchId(1), 0, gpu, 1, 2, 3)]
    assert [each.name for each in damaged] == [b"nonsense", b"2:0", b"3:0"]


async def test_a_successor_has_the_same_cache_slots(redis: Redis) -> None:
    keys = Keys("test")
    lease, store, journal = Lease(redis, keys, "a", 60.0), Store(redis, keys), Journal()
    assert await lease.try_acquire()
    book = Book()
    caches = tuple(book.slots.cache(agent, PartitionKey(MODEL, 0, 4)) for agent in AGENTS)
    for cache in caches:
        cache.capacity = 8
    for session in (1, 2):
        book.slots.reserve(SessionId(session), Claims(caches, (4, 3, 1)), 10, 90)
    book.slots.reserve(SessionId(3), Claims(caches[1:2], (2,)), 20, 95)
    write_reservations(journal, book.take_changes())
    await store.apply(lease, journal.take())
    book.slots.release(SessionId(1))
    book.slots.release(SessionId(2), AGENTS[1])
    write_reservations(journal, book.take_changes())
    await store.apply(lease, journal.take())
    stored = await Store(redis, keys).load()
    successor = Book()
    successor.restore(shifted(stored.book, 500))
    assert {(r.session, r.resource, r.slots) for r in successor.snapshot()} == {
        (SessionId(2), caches[0].resource, 4),
        (SessionId(2), caches[2].resource, 1),
        (SessionId(3), caches[1].resource, 2),
    }
    assert {r.expires_ns for r in successor.snapshot()} == {590, 595}


def test_slots_are_one_more_number_and_records_without_them_are_read_as_before() -> None:
    cache, gpu = ResourceId("cache/a/toy:1[0,4)"), ResourceId("gpu/a")
    timed = Reservation(BatchId(7), 1, gpu, 1, 2, 3, done=True)
    counted = Reservation(BatchId(0), 0, cache, 1, 3, 3, slots=4, session=SessionId(7))
    tables = tables_of([timed, counted])
    assert tables["book:gpu/a"] == {"7:1": "1 2 3 1"}
    assert tables["book:cache/a/toy:1[0,4)"] == {"7:0": "1 3 3 0 4"}
    for resource, reservation in ((gpu, timed), (cache, counted)):
        fields = tables[f"book:{resource}"]
        raw = {name.encode(): str(value).encode() for name, value in fields.items()}
        found, damaged = read_table("book", book_shape(resource), raw)
        assert (list(found.values()), damaged) == ([reservation], [])
