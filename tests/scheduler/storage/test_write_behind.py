from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from catenary_scheduler.storage.journal import Journal, JournalChanges
from catenary_scheduler.storage.keys import RedisKeys, RedisTable
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.store import Store
from catenary_scheduler.storage.write_behind import FlushSchedule, StateSources, WriteBehind
from catenary_services.domain.ids import Epoch
from catenary_services.errors import StaleEpoch
from catenary_services.redis.embedded_redis import EmbeddedRedis
from scheduling_cases.stored_tables import raw_table
from shared_helpers.waiting import until

KEYS = RedisKeys("test")
SCHEDULE = FlushSchedule(flush_s=0.002, renew_s=0.05, longest_backoff_s=0.05)


class Leader:
    def __init__(self, redis: Redis, name: str = "leader", ttl_s: float = 60.0) -> None:
        self.redis = redis
        self.lease = Lease(redis, KEYS, name, ttl_s)
        self.store = Store(redis, KEYS)
        self.journal = Journal()
        self.state: dict[str, str] = {}
        self.epochs: list[Epoch] = []
        sources = StateSources(lambda: None, self.snapshot, self.epochs.append)
        self.write_behind = WriteBehind(self.store, self.lease, self.journal, sources, SCHEDULE)

    def snapshot(self) -> JournalChanges:
        return JournalChanges({RedisTable.PLAN: dict(self.state)}, replace=True)

    def put(self, name: str, value: str) -> None:
        self.state[name] = value
        self.journal.put(RedisTable.PLAN, name, value)
        self.write_behind.touch()

    async def stored(self) -> dict[str, str]:
        return await raw_table(self.redis, KEYS, RedisTable.PLAN)


@asynccontextmanager
async def running(leader: Leader) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(leader.write_behind.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settled(leader: Leader) -> None:
    await until(lambda: not leader.journal and leader.write_behind.connected, "written")
    deadline = time.monotonic() + 30
    while await leader.stored() != leader.state:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def kill(server: EmbeddedRedis) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)


async def test_changes_arrive_soon(redis: Redis) -> None:
    leader = Leader(redis)
    assert await leader.lease.try_acquire()
    async with running(leader):
        for number in range(100):
            leader.put(str(number), "x")
        await settled(leader)
    assert len(await leader.stored()) == 100


async def test_the_lease_is_kept_while_nothing_happens(redis: Redis) -> None:
    leader = Leader(redis)
    assert await leader.lease.try_acquire()
    await redis.pexpire(KEYS.lease, 1_000)
    async with running(leader):
        deadline = time.monotonic() + 30
        while await redis.pttl(KEYS.lease) < 50_000:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_killed_redis_comes_back_and_nothing_is_missing(
    redis: Redis, server: EmbeddedRedis
) -> None:
    leader = Leader(redis)
    assert await leader.lease.try_acquire()
    async with running(leader):
        leader.put("before", "1")
        await settled(leader)
        kill(server)
        await server.wait()
        await until(lambda: not leader.write_behind.connected, "the loss is noticed")
        leader.put("during", "2")
        await server.start()
        await settled(leader)
    assert await leader.stored() == {"before": "1", "during": "2"}


async def test_redis_that_forgot_everything_gets_a_snapshot_of_a_higher_epoch(
    redis: Redis,
) -> None:
    leader = Leader(redis)
    assert await leader.lease.try_acquire(beyond=6)
    async with running(leader):
        leader.put("a", "1")
        await settled(leader)
        await redis.flushall()
        await until(lambda: bool(leader.epochs), "the lease is taken again")
        await settled(leader)
    assert leader.epochs == [8]
    assert leader.lease.epoch == 8


async def test_an_expired_lease_nobody_wanted_is_taken_again(redis: Redis) -> None:
    leader = Leader(redis)
    assert await leader.lease.try_acquire()
    await redis.delete(KEYS.lease)
    async with running(leader):
        leader.put("a", "1")
        await settled(leader)
    assert leader.epochs == [2]


async def test_a_successor_ends_the_term(redis: Redis) -> None:
    leader, successor = Leader(redis, "old"), Leader(redis, "new")
    assert await leader.lease.try_acquire()
    await redis.delete(KEYS.lease)
    assert await successor.lease.try_acquire()
    leader.put("a", "1")
    async with running(leader) as task, asyncio.timeout(30):
        with pytest.raises(StaleEpoch):
            await task
    assert (await leader.stored()) == {}


async def test_a_leader_in_between_ends_the_term_even_if_it_is_gone(redis: Redis) -> None:
    leader, other = Leader(redis, "old"), Leader(redis, "other")
    assert await leader.lease.try_acquire()
    await leader.lease.release()
    assert await other.lease.try_acquire()
    await other.lease.release()
    async with running(leader) as task, asyncio.timeout(30):
        with pytest.raises(StaleEpoch):
            await task
    assert await redis.get(KEYS.lease) is None


async def test_an_agent_of_a_higher_epoch_lifts_ours_beyond_it(redis: Redis) -> None:
    leader = Leader(redis)
    assert await leader.lease.try_acquire()
    async with running(leader):
        leader.write_behind.go_beyond(9)
        await until(lambda: leader.epochs == [10], "the epoch is lifted")
        leader.write_behind.go_beyond(10)
        leader.put("a", "1")
        await settled(leader)
    assert leader.epochs == [10]


async def test_an_overflow_while_redis_is_away_ends_in_a_snapshot(
    redis: Redis, server: EmbeddedRedis
) -> None:
    leader = Leader(redis)
    leader.journal = Journal(limit=10)
    sources = StateSources(lambda: None, leader.snapshot, leader.epochs.append)
    leader.write_behind = WriteBehind(leader.store, leader.lease, leader.journal, sources, SCHEDULE)
    assert await leader.lease.try_acquire()
    async with running(leader):
        kill(server)
        await server.wait()
        for number in range(50):
            leader.put(str(number), "x")
        assert leader.journal.needs_snapshot
        await server.start()
        await settled(leader)
    assert len(await leader.stored()) == 50


async def test_a_replica_without_our_last_writes_is_written_anew(redis: Redis) -> None:
    leader = Leader(redis)
    assert await leader.lease.try_acquire()
    async with running(leader):
        leader.put("a", "1")
        await settled(leader)
        older = await redis.dump(KEYS.clock)
        leader.put("b", "2")
        await settled(leader)
        # Lease and epoch are as they were, what came last is not there.
        await redis.restore(KEYS.clock, 0, older, replace=True)
        await redis.hdel(KEYS.table(RedisTable.PLAN), "b")
        leader.put("c", "3")
        await settled(leader)
    assert await leader.stored() == {"a": "1", "b": "2", "c": "3"}
    assert leader.epochs == []


async def test_what_keeps_redis_from_writing_is_named_once(redis: Redis) -> None:
    leader = Leader(redis)
    kinds: list[str] = []
    sources = StateSources(lambda: None, leader.snapshot, leader.epochs.append, kinds.append)
    leader.write_behind = WriteBehind(leader.store, leader.lease, leader.journal, sources, SCHEDULE)
    assert await leader.lease.try_acquire()
    await redis.config_set("maxmemory", "1")
    async with running(leader):
        leader.put("a", "1")
        await until(lambda: len(kinds) > 1, "two failures")
        assert not leader.write_behind.connected
        assert leader.write_behind.problem
        await redis.config_set("maxmemory", "0")
        await settled(leader)
        assert not leader.write_behind.problem
    assert set(kinds) == {"memory_full"}


async def test_of_two_leaders_of_one_epoch_the_second_goes_beyond(redis: Redis) -> None:
    leader = Leader(redis)
    assert await leader.lease.try_acquire(beyond=6)
    async with running(leader):
        leader.write_behind.go_beyond(7)
        leader.put("a", "1")
        await settled(leader)
        assert leader.epochs == []
        leader.write_behind.go_beyond(7, shared=True)
        await until(lambda: leader.epochs == [8], "the epoch is lifted")
