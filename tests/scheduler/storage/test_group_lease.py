"""Leases, epochs and keys of several groups in one Redis."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from catenary_scheduler.storage.journal import JournalChanges
from catenary_scheduler.storage.keys import RedisKeys, RedisTable
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.store import Store
from catenary_services.domain.groups import (
    EPOCH_STRIDE,
    first_id,
    group_named,
    group_of_epoch,
    group_of_id,
    next_epoch,
)
from scheduling_cases.stored_tables import raw_table

GROUPS = 3


def lease_of(redis: Redis, group: int, token: str = "one", groups: int = GROUPS) -> Lease:
    return Lease(redis, RedisKeys("test", group, groups), token, 60.0)


async def test_each_group_is_led_by_one_with_epochs_nobody_else_has(redis: Redis) -> None:
    seen: set[int] = set()
    for group in range(GROUPS):
        lease = lease_of(redis, group)
        for _ in range(4):
            assert await lease.try_acquire()
            assert not await lease_of(redis, group, "another").try_acquire()
            assert group_of_epoch(lease.epoch, GROUPS) == group
            assert group_of_id(first_id(lease.epoch) + 12_345, GROUPS) == group
            assert lease.epoch not in seen
            seen.add(lease.epoch)
            await lease.release()
    assert len(seen) == 4 * GROUPS


@pytest.mark.parametrize("beyond", [1, 62, 63, 64, 65, 1_000])
async def test_redis_and_we_agree_on_the_next_epoch(redis: Redis, beyond: int) -> None:
    for group in range(GROUPS):
        lease = lease_of(redis, group)
        assert await lease.try_acquire(beyond)
        assert lease.epoch == next_epoch(beyond, group, GROUPS) > beyond
        assert lease.epoch - beyond <= EPOCH_STRIDE
        assert lease.follows(beyond)
        before = lease.epoch
        await lease.release()
        other = lease_of(redis, group, "another")
        assert await other.try_acquire()
        await other.release()
        assert await lease.try_acquire()
        assert not lease.follows(before), "another one led in between"
        await lease.release()


async def test_one_group_has_the_keys_and_epochs_it_always_had(redis: Redis) -> None:
    keys = RedisKeys("test", 0, 1)
    lease = Lease(redis, keys, "one", 60.0)
    assert await lease.try_acquire()
    assert (lease.epoch, lease.follows(0)) == (1, True)
    await Store(redis, keys).apply(lease, JournalChanges({RedisTable.PLAN: {"a": "b"}}))
    assert set(await redis.keys("*")) == {
        b"catenary:{test}:lease",
        b"catenary:{test}:epoch",
        b"catenary:{test}:clock",
        b"catenary:{test}:plan",
    }
    await lease.release()
    assert await lease.try_acquire()
    assert lease.epoch == 2


async def test_groups_share_no_key_and_each_has_its_own_hash_tag(redis: Redis) -> None:
    for group in range(GROUPS):
        lease = lease_of(redis, group)
        assert await lease.try_acquire()
        store = Store(redis, RedisKeys("test", group, GROUPS))
        await store.apply(lease, JournalChanges({RedisTable.PLAN: {"group": str(group)}}))
    for group in range(GROUPS):
        assert await raw_table(redis, RedisKeys("test", group, GROUPS), RedisTable.PLAN) == {
            "group": str(group)
        }
    tags = {key.split(b"{")[1].split(b"}")[0] for key in await redis.keys("*")}
    assert tags == {b"test/0", b"test/1", b"test/2"}


async def test_a_look_shows_who_leads_for_how_long_and_who_wants_to(redis: Redis) -> None:
    lease, other = lease_of(redis, 1), lease_of(redis, 1, "another")
    view = await other.look()
    assert (view.holder, view.left_s, view.wanted_by) == ("", 0.0, "")
    assert await lease.try_acquire()
    await other.want()
    view = await lease.look()
    assert (view.holder, view.wanted_by) == ("one", "another")
    assert 50 < view.left_s <= 60
    assert (await lease_of(redis, 0).look()).holder == ""


def test_names_are_dealt_out_evenly_and_always_alike() -> None:
    assert [group_named(f"agent-{n}", 4) for n in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert group_named("gpu-box-a", 4) == group_named("gpu-box-a", 4)
    spread = {group_named(f"{letter}-box", 4) for letter in "abcdefghijklmnopqrstuvwxyz"}
    assert spread == {0, 1, 2, 3}
