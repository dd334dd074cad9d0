"""Damage in a real server: load succeeds, what is damaged lies in quarantine, the rest is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from catenary_scheduler.storage.journal import JournalChanges
from catenary_scheduler.storage.keys import RedisKeys, RedisTable, book_table
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.quarantine import ENTRIES_KEPT, LARGEST_KEPT_BYTES
from catenary_scheduler.storage.store import Store, StoreBehind
from catenary_scheduler.storage.values.codec import LARGEST_VALUE_BYTES
from catenary_services.domain.groups import EPOCH_LIMIT, HIGHEST_GRANTED
from catenary_services.domain.ids import ResourceId
from catenary_services.errors import StaleEpoch
from scheduling_cases.stored_tables import GOOD, raw_table

KEYS = RedisKeys("test")
GPU = book_table(ResourceId("gpu/agent-0"))
POISON = [str(2**64 - 1), str(2**53 + 1), "abc", "-5", "1.5", "", str(EPOCH_LIMIT), "9" * 400]


@pytest.fixture
async def lease(redis: Redis) -> Lease:
    lease = Lease(redis, KEYS, "leader", 60.0)
    assert await lease.try_acquire()
    return lease


async def fill(redis: Redis, lease: Lease) -> Store:
    store = Store(redis, KEYS)
    tables: dict[str, Any] = {table: dict(fields) for table, fields in GOOD.items()}
    # Every resource of the book has a table, and every agent in it is known.
    tables[RedisTable.RESOURCES] = dict.fromkeys(GOOD[RedisTable.RESOURCES], "1")
    await store.apply(lease, JournalChanges(tables, replace=True))
    return store


async def entries(redis: Redis, stream: str) -> list[dict[str, str]]:
    found = await redis.xrange(stream)
    return [
        {k.decode(): v.decode(errors="replace") for k, v in fields.items()} for _, fields in found
    ]


async def spoil(redis: Redis, key: str, kind: str) -> None:
    await redis.delete(key)
    if kind == "string":
        await redis.set(key, "x" * 10_000)
    elif kind == "list":
        await redis.rpush(key, "a", "b")  # type: ignore[misc]
    elif kind == "set":
        await redis.sadd(key, "a")  # type: ignore[misc]
    elif kind == "zset":
        await redis.zadd(key, {"a": 1.0})
    elif kind == "stream":
        await redis.xadd(key, {"a": "1"})
    else:
        await redis.hset(key, "a", "1")  # type: ignore[misc]


async def test_what_is_whole_is_read_and_nothing_is_put_away(redis: Redis, lease: Lease) -> None:
    await fill(redis, lease)
    store = Store(redis, KEYS)
    stored = await store.load()
    assert stored.damage == ()
    assert stored.plan.active_id == "plan-1-1"
    assert len(stored.measured.costs) == 2
    await store.put_away(stored.damage, lease)
    assert await redis.exists(KEYS.quarantine) == 0


@pytest.mark.parametrize("table", [*map(str, RedisTable), GPU])
async def test_a_damaged_field_of_any_table_goes_and_the_rest_stays(
    redis: Redis, lease: Lease, table: str
) -> None:
    await fill(redis, lease)
    before = await raw_table(redis, KEYS, table)
    bad = b"\xff\x00bad"
    await redis.hset(KEYS.table(table), bad, b"\xfe{")  # type: ignore[misc]
    store = Store(redis, KEYS)
    stored = await store.load()
    assert [(each.table, each.name) for each in stored.damage] == [(table, bad)]
    await store.put_away(stored.damage, lease)
    assert await raw_table(redis, KEYS, table) == before
    (kept,) = await redis.xrange(KEYS.quarantine)
    assert kept[1][b"table"] == table.encode()
    assert (kept[1][b"name"], kept[1][b"value"]) == (bad, b"\xfe{")
    (event,) = await entries(redis, KEYS.events)
    assert (event["kind"], event["table"], event["count"]) == ("quarantined", table, "1")
    assert "bad" in event["names"]
    assert (await store.load()).damage == ()


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream"])
@pytest.mark.parametrize("table", [*map(str, RedisTable), GPU, "clock"])
async def test_a_key_of_another_type_goes(
    redis: Redis, lease: Lease, table: str, kind: str
) -> None:
    await fill(redis, lease)
    await spoil(redis, KEYS.table(table), kind)
    store = Store(redis, KEYS)
    stored = await store.load()
    assert (table, b"") in {(each.table, each.name) for each in stored.damage}
    if table not in (RedisTable.PLAN, "clock"):
        assert stored.plan.active_id == "plan-1-1"
    await store.put_away(stored.damage, lease)
    kept = [each for each in await entries(redis, KEYS.quarantine) if each["table"] == table]
    assert kept[0]["type"] == kind
    if kind == "string":
        assert kept[0]["value"] == "x" * LARGEST_KEPT_BYTES
    assert await redis.exists(KEYS.table(table)) == 0
    assert (await store.load()).damage == ()


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream"])
@pytest.mark.parametrize("table", [*map(str, RedisTable), GPU, "clock", "events"])
async def test_a_leader_writes_over_a_key_of_another_type(
    redis: Redis, lease: Lease, table: str, kind: str
) -> None:
    store = await fill(redis, lease)
    await spoil(redis, KEYS.table(table), "hash" if (table, kind) == ("events", "stream") else kind)
    changes = JournalChanges({table: {"new": "1"}}, [{"kind": "x"}])
    if table in ("clock", "events"):
        changes = JournalChanges({RedisTable.PLAN: {"new": "1"}}, [{"kind": "x"}])
    with pytest.raises(StoreBehind, match="spoiled"):
        await store.apply(lease, changes)
    assert [each["table"] for each in await entries(redis, KEYS.quarantine)] == [table]
    assert "x" in [each["kind"] for each in await entries(redis, KEYS.events)]
    await store.apply(lease, JournalChanges({RedisTable.PLAN: {"new": "2"}}))
    assert (await raw_table(redis, KEYS, RedisTable.PLAN))["new"] == "2"


async def test_a_snapshot_puts_keys_of_another_type_away_as_well(
    redis: Redis, lease: Lease
) -> None:
    store = await fill(redis, lease)
    for table in RedisTable:
        await spoil(redis, KEYS.table(table), "list")
    await store.apply(lease, JournalChanges({RedisTable.PLAN: {"new": "1"}}, replace=True))
    kept = {each["table"] for each in await entries(redis, KEYS.quarantine)}
    assert kept == {str(table) for table in RedisTable}
    assert await raw_table(redis, KEYS, RedisTable.PLAN) == {"new": "1"}


async def test_a_huge_value_is_not_read_and_goes_in_part(redis: Redis, lease: Lease) -> None:
    await fill(redis, lease)
    key = KEYS.table(RedisTable.PLAN)
    await redis.hset(key, "notes", "n" * (LARGEST_VALUE_BYTES + 1))  # type: ignore[misc]
    await redis.hset(key, "m" * 100_000, "1")  # type: ignore[misc]
    store = Store(redis, KEYS)
    stored = await store.load()
    assert {each.why for each in stored.damage} == {"is too large"}
    assert all(len(each.value) <= LARGEST_KEPT_BYTES for each in stored.damage)
    assert stored.plan.active is not None
    await store.put_away(stored.damage, lease)
    assert (await store.load()).damage == ()
    sizes = {each["size"] for each in await entries(redis, KEYS.quarantine)}
    assert str(LARGEST_VALUE_BYTES + 1) in sizes


async def test_the_quarantine_is_bounded_and_mended_itself(redis: Redis, lease: Lease) -> None:
    await fill(redis, lease)
    await redis.set(KEYS.quarantine, "somebody's")
    await redis.set(KEYS.events, "somebody's")
    bad = {str(number): "?" for number in range(-3 * ENTRIES_KEPT, 0)}
    await redis.hset(KEYS.table(RedisTable.SESSIONS), mapping=bad)  # type: ignore[misc]
    store = Store(redis, KEYS)
    stored = await store.load()
    assert len(stored.damage) == len(bad)
    await store.put_away(stored.damage, lease)
    assert await redis.xlen(KEYS.quarantine) == ENTRIES_KEPT
    assert len(await raw_table(redis, KEYS, RedisTable.SESSIONS)) == len(GOOD[RedisTable.SESSIONS])
    events = await entries(redis, KEYS.events)
    assert sum(int(e["count"]) for e in events if e["table"] == RedisTable.SESSIONS) == len(bad)


async def test_who_does_not_lead_puts_nothing_away(redis: Redis, lease: Lease) -> None:
    await fill(redis, lease)
    await redis.hset(KEYS.table(RedisTable.PLAN), "active", "?")  # type: ignore[misc]
    store = Store(redis, KEYS)
    stored = await store.load()
    await redis.set(KEYS.lease, "another")
    with pytest.raises(StaleEpoch):
        await store.put_away(stored.damage, lease)
    assert (await raw_table(redis, KEYS, RedisTable.PLAN))["active"] == "?"


async def test_a_reservation_of_nobody_or_of_next_year_is_not_believed(
    redis: Redis, lease: Lease
) -> None:
    await fill(redis, lease)
    far = str(2**61)
    await redis.hset(KEYS.table(GPU), "9:0", f"1 2 {far} 0")  # type: ignore[misc]
    await redis.hset(KEYS.table(RedisTable.RESOURCES), "gpu/nobody", "1")  # type: ignore[misc]
    await redis.hset(KEYS.table("book:gpu/nobody"), "8:0", "1 2 3 0")  # type: ignore[misc]
    stored = await Store(redis, KEYS).load()
    assert {(each.table, each.name) for each in stored.damage} == {
        (GPU, b"9:0"),
        ("book:gpu/nobody", b"8:0"),
    }
    assert len(stored.book) == 3


# ---- the epoch and the lease ----


@pytest.mark.parametrize("poison", POISON)
async def test_a_new_leader_gets_past_a_poisoned_epoch(redis: Redis, poison: str) -> None:
    found: list[int] = []
    first = Lease(redis, KEYS, "a", 60.0)
    assert await first.try_acquire(beyond=6)
    await Store(redis, KEYS).apply(first, JournalChanges({RedisTable.PLAN: {"file": "x"}}))
    await first.release()
    await redis.set(KEYS.epoch, poison)
    second = Lease(redis, KEYS, "b", 60.0, lambda: found.append(1))
    assert await second.try_acquire()
    assert second.epoch == 8  # the clock knows the last one
    assert await redis.get(KEYS.epoch) == b"8"
    assert len(found) == 1
    (kept,) = await entries(redis, KEYS.quarantine)
    assert (kept["table"], kept["value"]) == ("epoch", poison)
    assert [each["table"] for each in await entries(redis, KEYS.events)] == ["epoch"]


@pytest.mark.parametrize("kind", ["list", "set", "zset", "stream", "hash"])
async def test_an_epoch_of_another_type_is_replaced(redis: Redis, kind: str) -> None:
    await spoil(redis, KEYS.epoch, kind)
    lease = Lease(redis, KEYS, "a", 60.0)
    assert await lease.try_acquire(beyond=3)
    assert lease.epoch == 4
    assert [each["type"] for each in await entries(redis, KEYS.quarantine)] == [kind]


@pytest.mark.parametrize("poison", [*POISON, None])
async def test_a_leader_puts_its_epoch_right(
    redis: Redis, lease: Lease, poison: str | None
) -> None:
    store = await fill(redis, lease)
    epoch = lease.epoch
    for act in (
        lease.renew(),
        store.apply(lease, JournalChanges({RedisTable.PLAN: {"file": "y"}})),
    ):
        if poison is None:
            await spoil(redis, KEYS.epoch, "list")
        else:
            await redis.set(KEYS.epoch, poison)
        assert await act in (True, None)
        assert await redis.get(KEYS.epoch) == str(epoch).encode()
    await redis.delete(KEYS.epoch)
    assert await lease.renew()
    assert lease.epoch == epoch


async def test_an_epoch_far_from_the_last_one_is_not_believed(redis: Redis, lease: Lease) -> None:
    await fill(redis, lease)
    await redis.set(KEYS.epoch, HIGHEST_GRANTED - 1)
    assert await lease.renew()
    await lease.release()
    await redis.set(KEYS.epoch, HIGHEST_GRANTED - 1)
    successor = Lease(redis, KEYS, "b", 60.0)
    assert await successor.try_acquire()
    assert successor.epoch == 2


async def test_a_lease_that_is_none_keeps_nobody_out_for_long(redis: Redis) -> None:
    await redis.rpush(KEYS.lease, "x")  # type: ignore[misc]
    await redis.rpush(KEYS.wanted, "x")  # type: ignore[misc]
    lease = Lease(redis, KEYS, "a", 0.2)
    view = await lease.look()
    assert (view.holder, view.wanted_by) == ("", "")
    assert await lease.try_acquire()
    await lease.release()
    await redis.set(KEYS.lease, b"\xff for ever")
    assert not await lease.try_acquire()
    assert 0 < await redis.pttl(KEYS.lease) <= 200


async def test_a_leader_whose_lease_was_spoiled_takes_it_again(redis: Redis, lease: Lease) -> None:
    await spoil(redis, KEYS.lease, "list")
    assert not await lease.renew()
    assert await lease.try_acquire()
    assert lease.epoch == 2


async def test_the_store_of_the_version_before_is_read_whole(redis: Redis) -> None:
    """A scheduler of commit 64dbb8b left this, with two sessions and a batch in flight."""
    file = Path(__file__).parent / "written_by_64dbb8b.json"
    for key, fields in json.loads(file.read_text()).items():
        await redis.hset(key, mapping=fields)
    stored = await Store(redis, RedisKeys("main")).load()
    assert stored.damage == ()
    assert stored.anchor is not None
    assert stored.plan.fixed is not None
    assert stored.plan.fixed == stored.plan.active
    assert {model.model.name for model in stored.plan.fixed.models} == {"llm", "toy"}
    assert (len(stored.deployments), len(stored.draining), len(stored.peers)) == (2, 1, 4)
    assert (len(stored.measured.costs), len(stored.measured.times)) == (2, 2)
    assert list(stored.measured.links.values()) == [104_857_600]
    assert [len(hops) for hops in stored.sessions.values()] == [2, 2]
    assert sum(each.slots for each in stored.book) == 12
