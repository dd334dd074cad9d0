from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from catenary_scheduler.storage.keys import RedisKeys
from catenary_scheduler.storage.lease import Lease

KEYS = RedisKeys("test")


def candidate(redis: Redis, name: str, ttl_s: float = 10.0) -> Lease:
    return Lease(redis, KEYS, name, ttl_s)


async def test_one_of_many_candidates_wins(redis: Redis) -> None:
    leases = [candidate(redis, f"s{i}") for i in range(8)]
    won = await asyncio.gather(*(lease.try_acquire() for lease in leases))
    assert sum(won) == 1
    assert [lease.epoch for lease in leases if lease.epoch] == [1]


async def test_epoch_grows_with_every_leader(redis: Redis) -> None:
    first, second = candidate(redis, "a"), candidate(redis, "b")
    assert await first.try_acquire()
    assert not await second.try_acquire()
    await first.release()
    assert await second.try_acquire()
    assert (first.epoch, second.epoch) == (1, 2)


async def test_lease_expires_and_its_holder_notices(redis: Redis) -> None:
    first, second = candidate(redis, "a", ttl_s=0.05), candidate(redis, "b")
    assert await first.try_acquire()
    deadline = time.monotonic() + 30
    while not await second.try_acquire():
        assert time.monotonic() < deadline
    assert not await first.renew()
    assert await second.renew()


async def test_renewal_prolongs(redis: Redis) -> None:
    lease = candidate(redis, "a", ttl_s=60.0)
    assert await lease.try_acquire()
    await redis.pexpire(KEYS.lease, 1_000)
    assert await lease.renew()
    assert await redis.pttl(KEYS.lease) > 50_000


async def test_release_leaves_the_lease_of_another_alone(redis: Redis) -> None:
    first, second = candidate(redis, "a"), candidate(redis, "b")
    assert await first.try_acquire()
    await second.release()
    assert await first.renew()


async def test_epoch_goes_beyond_what_redis_forgot(redis: Redis) -> None:
    lease = candidate(redis, "a")
    assert await lease.try_acquire(beyond=41)
    assert lease.epoch == 42
    await redis.flushall()
    assert await lease.try_acquire()
    assert lease.epoch == 43


async def test_same_token_of_another_epoch_is_not_renewed(redis: Redis) -> None:
    lease = candidate(redis, "a")
    assert await lease.try_acquire()
    await redis.incr(KEYS.epoch)
    assert not await lease.renew()


async def test_scripts_survive_a_server_that_forgot_them(redis: Redis) -> None:
    lease = candidate(redis, "a")
    assert await lease.try_acquire()
    await redis.script_flush()
    assert await lease.renew()


async def test_a_standby_leaves_a_forgetful_redis_to_whoever_led(redis: Redis) -> None:
    leader, standby = candidate(redis, "a"), candidate(redis, "b")
    assert await leader.try_acquire(beyond=6)
    assert not await standby.try_acquire(unless_forgotten=True)
    await redis.flushall()
    assert not await standby.try_acquire(unless_forgotten=True)
    assert standby.is_forgotten
    assert await redis.get(KEYS.lease) is None
    # If nobody comes it leads after all, and goes beyond what it was told before.
    assert await standby.try_acquire()
    assert (standby.epoch, standby.is_forgotten) == (8, True)


async def test_a_candidate_is_told_how_long_the_lease_of_another_lasts(redis: Redis) -> None:
    leader, standby = candidate(redis, "a", ttl_s=600.0), candidate(redis, "b")
    began = time.monotonic()
    assert await leader.try_acquire()
    assert not await standby.try_acquire()
    elapsed_s = time.monotonic() - began
    # Redis counts whole milliseconds on a clock of its own.
    assert 600.0 - elapsed_s - 0.01 <= standby.left_s <= 600.0


async def test_only_a_lease_that_lasts_too_long_can_be_broken(redis: Redis) -> None:
    leader, standby = candidate(redis, "a", ttl_s=600.0), candidate(redis, "b", ttl_s=600.0)
    assert await leader.try_acquire()
    assert not await standby.break_stale()
    await redis.pexpire(KEYS.lease, 3_600_000)
    assert await standby.break_stale()
    assert await standby.try_acquire()


async def test_a_free_lease_is_not_free_to_take_while_redis_refuses_writes(redis: Redis) -> None:
    leader, standby = candidate(redis, "a"), candidate(redis, "b")
    assert not await standby.is_held()
    assert await redis.exists(KEYS.lease) == 0
    assert await leader.try_acquire()
    await redis.config_set("min-replicas-to-write", 1)
    assert await standby.is_held()
    await redis.config_set("min-replicas-to-write", 0)
    await leader.release()
    for name, refusing, usual in (("min-replicas-to-write", 1, 0), ("maxmemory", 1, 0)):
        await redis.config_set(name, refusing)
        with pytest.raises(RedisError):
            await standby.is_held()
        await redis.config_set(name, usual)
        assert not await standby.is_held()
    assert await standby.try_acquire()


async def test_what_is_no_lease_is_held_by_nobody(redis: Redis) -> None:
    lease = candidate(redis, "a")
    await redis.set(KEYS.lease, "for ever")
    assert not await lease.is_held()
    assert await redis.get(KEYS.lease) == b"for ever"
    await redis.delete(KEYS.lease)
    await redis.hset(KEYS.lease, "no", "lease")
    assert not await lease.is_held()
    assert await redis.hgetall(KEYS.lease) == {b"no": b"lease"}
