from __future__ import annotations

import pytest
from redis.asyncio import Redis

from catenary_scheduler.book import Reservation
from catenary_scheduler.storage.clock import now_ns, translation_ns
from catenary_scheduler.storage.journal import JournalChanges
from catenary_scheduler.storage.keys import RedisKeys, RedisTable, book_table
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.store import ClockAnchor, Store
from catenary_scheduler.storage.values.stored import StoredPlan
from catenary_services.domain.ids import BatchId, ResourceId
from catenary_services.errors import InvalidInput, StaleEpoch
from scheduling_cases.stored_tables import raw_table

KEYS = RedisKeys("test")


def change(value: str | None, *, replace: bool = False) -> JournalChanges:
    return JournalChanges({RedisTable.PLAN: {"active_id": value}}, replace=replace)


@pytest.fixture
async def lease(redis: Redis) -> Lease:
    lease = Lease(redis, KEYS, "leader", 60.0)
    assert await lease.try_acquire()
    return lease


async def test_what_is_applied_is_loaded(redis: Redis, lease: Lease) -> None:
    store = Store(redis, KEYS)
    gpu = ResourceId("gpu/agent-0")
    tables = {RedisTable.RESOURCES: {gpu: "1"}, book_table(gpu): {"7:0": "1 2 3 0"}}
    await store.apply(lease, JournalChanges({**tables, RedisTable.PLAN: {"active_id": "x"}}))
    stored = await Store(redis, KEYS).load()
    assert await raw_table(redis, KEYS, RedisTable.PLAN) == {"active_id": "x"}
    assert stored.plan.active_id == "x"
    assert stored.book == [Reservation(BatchId(7), 0, gpu, 1, 2, 3)]
    await store.apply(lease, JournalChanges({RedisTable.PLAN: {"active_id": None}}))
    assert (await store.load()).plan == StoredPlan()


async def test_a_fenced_leader_writes_nothing(redis: Redis, lease: Lease) -> None:
    old, new = Store(redis, KEYS), Store(redis, KEYS)
    await old.apply(lease, change("old"))
    successor = Lease(redis, KEYS, "successor", 60.0)
    await redis.delete(KEYS.lease)  # as if it had expired while the leader was paused
    assert await successor.try_acquire()
    with pytest.raises(StaleEpoch):
        await old.apply(lease, change("from the grave"))
    await new.apply(successor, change("new"))
    assert (await new.load()).plan.active_id == "new"


async def test_an_expired_lease_fences_too(redis: Redis, lease: Lease) -> None:
    await redis.delete(KEYS.lease)
    with pytest.raises(StaleEpoch):
        await Store(redis, KEYS).apply(lease, change("x"))
    assert (await Store(redis, KEYS).load()).plan == StoredPlan()


async def test_a_snapshot_replaces_everything(redis: Redis, lease: Lease) -> None:
    store = Store(redis, KEYS)
    gone, kept = ResourceId("gpu/gone"), ResourceId("gpu/kept")
    await store.apply(
        lease,
        JournalChanges(
            {
                RedisTable.RESOURCES: {gone: "1"},
                book_table(gone): {"1:0": "1 2 3 0"},
                RedisTable.PLAN: {"stale": "x"},
            }
        ),
    )
    successor = Store(redis, KEYS)
    await successor.load()
    await successor.apply(
        lease,
        JournalChanges(
            {
                RedisTable.RESOURCES: {kept: "1"},
                book_table(kept): {"2:0": "4 5 6 1"},
            },
            replace=True,
        ),
    )
    stored = await successor.load()
    assert stored.plan == StoredPlan()
    assert stored.book == [Reservation(BatchId(2), 0, kept, 4, 5, 6, done=True)]
    assert await redis.exists(KEYS.table(book_table(gone))) == 0


async def test_thousands_of_fields_go_in_one_batch(redis: Redis, lease: Lease) -> None:
    store = Store(redis, KEYS)
    fields: dict[str, str | None] = {str(number): "x" * 50 for number in range(12_000)}
    await store.apply(lease, JournalChanges({RedisTable.BATCHES: fields}))
    assert len(await raw_table(redis, KEYS, RedisTable.BATCHES)) == 12_000
    await store.apply(lease, JournalChanges({RedisTable.BATCHES: dict.fromkeys(fields)}))
    assert await raw_table(redis, KEYS, RedisTable.BATCHES) == {}


async def test_the_event_stream_is_bounded(redis: Redis, lease: Lease) -> None:
    store = Store(redis, KEYS)
    for _ in range(4):
        await store.apply(lease, JournalChanges(events=[{"kind": "tick"}] * 2_000))
    assert 5_000 <= await redis.xlen(KEYS.events) < 6_000


async def test_every_key_carries_the_cluster_as_hash_tag(redis: Redis, lease: Lease) -> None:
    tables = {table: {"a": "1"} for table in RedisTable}
    await Store(redis, KEYS).apply(lease, JournalChanges(dict(tables), [{"kind": "x"}]))
    keys = [key.decode() for key in await redis.keys("*")]
    assert len(keys) == len(RedisTable) + 4
    assert all(key.startswith("catenary:{test}:") for key in keys)
    with pytest.raises(InvalidInput):
        RedisKeys("no{braces}")


async def test_the_clock_of_a_predecessor_is_translated(redis: Redis, lease: Lease) -> None:
    store = Store(redis, KEYS)
    before = now_ns()
    await store.apply(lease, change("x"))
    stored = await store.load()
    elapsed_ns = now_ns() - before
    assert stored.anchor is not None
    # Both clocks are this process's, so that moments stay where they are, but for the time that
    # reading two clocks one after the other takes; Redis' own goes a little faster or slower.
    assert abs(translation_ns(stored.anchor, stored.now)) <= elapsed_ns + 1_000_000


def test_translation_moves_by_the_difference_of_the_clocks() -> None:
    theirs = ClockAnchor(scheduler_ns=5_000_000_000, redis_us=1_000_000)
    ours = ClockAnchor(scheduler_ns=70_000_000_000, redis_us=3_000_000)
    # Two seconds passed: their 5 s are our 68 s.
    assert 5_000_000_000 + translation_ns(theirs, ours) == 68_000_000_000


def test_a_clock_of_redis_that_was_set_back_moves_nothing_into_the_future() -> None:
    theirs = ClockAnchor(scheduler_ns=5_000_000_000, redis_us=3_600_000_000)
    ours = ClockAnchor(scheduler_ns=70_000_000_000, redis_us=2_000_000)
    assert 5_000_000_000 + translation_ns(theirs, ours) == 70_000_000_000


async def test_a_batch_whose_answer_was_lost_is_applied_once(
    redis: Redis, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(redis, KEYS)
    monkeypatch.setattr("catenary_scheduler.storage.store.time.monotonic_ns", lambda: 7)
    for _ in range(2):
        await store.apply(lease, JournalChanges(events=[{"kind": "leader"}]))
    assert await redis.xlen(KEYS.events) == 1
