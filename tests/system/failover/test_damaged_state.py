"""Values in Redis are damaged at random and the leader is killed: the cluster serves on.

Photographs and generation are asked for after every take-over, and what was damaged is named in the
quarantine and in the event stream. The seed is printed: `CATENARY_SEED=n` repeats a run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

import catenary
from catenary_scheduler.storage.keys import RedisKeys, RedisTable, book_table
from catenary_services.domain.ids import ResourceId
from catenary_services.redis.redis_client import connect
from deployed.redis_servers import STATE, RedisServer
from fault_cluster import (
    LEASE_S,
    FaultCluster,
    fault_cluster,
    nothing_is_booked,
    ready,
    until_status,
)
from machine_faults.fault_load import Load, prepared_load

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

KEYS = RedisKeys("main")
TABLES = [*map(str, RedisTable), book_table(ResourceId("gpu/agent-0")), "clock"]
EPOCHS = [str(2**64 - 1), str(2**53 + 1), "abc", None]
"""None: a list instead of a number."""
SETTLE_S = 3.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path / "state", STATE)
    await server.start()
    yield server
    server.end()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(server.url, timeout_s=2.0, retries=1)
    yield client
    await client.aclose()


async def kinds_of(redis: Redis, stream: str, field: str) -> set[tuple[str, ...]]:
    found = await redis.xrange(stream)
    return {
        (
            fields.get(b"table", b"").decode(),
            fields.get(field.encode(), b"").decode(errors="replace"),
        )
        for _, fields in found
    }


async def damage(redis: Redis, table: str, dice: random.Random) -> str:
    """Damages a table in one of many ways; returns the field, or nothing for the whole key."""
    key = KEYS.table(table)
    kind = await redis.type(key)
    names = sorted(await redis.hkeys(key)) if kind == b"hash" else []  # type: ignore[misc]
    names = [name for name in names if name not in (b"file", b"active_id")]  # any text will do
    if dice.random() < 0.35:
        await redis.delete(key)
        await dice.choice(
            (
                lambda: redis.set(key, dice.randbytes(100)),
                lambda: redis.rpush(key, "x"),
                lambda: redis.sadd(key, "x"),
            )
        )()  # type: ignore[misc]
        return ""
    value = dice.choice(
        (
            dice.randbytes(50),
            b"",
            b"\xff\xfe",
            b"{",
            b"[" * 50_000,
            b"-1 -1 -1 nan",
            b'{"v": 99}',
            b"9" * 5_000,
            b"v7 1 2 3",
        )
    )
    name = dice.choice(names) if names and dice.random() < 0.6 else b"odd \xff" + dice.randbytes(4)
    await redis.hset(key, name, value)  # type: ignore[misc]
    return str(name.decode(errors="replace"))


def leader_and_other(status: catenary.ClusterStatus) -> tuple[str, str]:
    other = "scheduler-1" if status.scheduler_id == "scheduler-0" else "scheduler-0"
    return status.scheduler_id, other


async def taken_over(client: catenary.AsyncClient, by: str) -> catenary.ClusterStatus:
    return await until_status(
        client,
        lambda s: s.scheduler_id == by and all(model.ready for model in s.models),
        60.0,
    )


async def served(load: Load, client: catenary.AsyncClient) -> None:
    """Asks for photographs and texts for a while; every one of them must be right."""
    count = len(load.outcomes)
    async with load.running():
        await load.for_s(SETTLE_S)
    mine = load.outcomes[count:]
    assert {each.kind for each in mine} == {"image", "text"}
    assert all(each.right for each in mine), [each for each in mine if not each.right]
    await nothing_is_booked(client)


async def hit(
    cluster: FaultCluster,
    redis: Redis,
    client: catenary.AsyncClient,
    dice: random.Random,
    tables: list[str],
    *,
    epoch: str | None = "",
) -> set[str]:
    """Kills the leader, damages what it left, and returns which tables were damaged."""
    leader, other = leader_and_other(await until_status(client, lambda s: bool(s.scheduler_id), 10))
    assert cluster[other].is_running
    # Both are still: a standby would otherwise take over between two damages.
    cluster[leader].kill()
    await redis.set(KEYS.lease, leader, px=round(2 * LEASE_S * 1000))
    # A book that is not listed is nobody's; agent-0 may have had nothing to do this time.
    await redis.hset(KEYS.table(RedisTable.RESOURCES), "gpu/agent-0", "1")  # type: ignore[misc]
    done = {table for table in tables if await damage(redis, table, dice) is not None}
    if epoch != "":
        done.add("epoch")
        await redis.delete(KEYS.epoch)
        if epoch is None:
            await redis.rpush(KEYS.epoch, "1")  # type: ignore[misc]
        else:
            await redis.set(KEYS.epoch, epoch)
    await redis.delete(KEYS.lease)
    await taken_over(client, other)
    cluster[leader].start()
    await ready(cluster)
    return done


async def test_damage_in_every_table_stops_nobody(
    tmp_path: Path, server: RedisServer, redis: Redis
) -> None:
    seed = int(os.environ.get("CATENARY_SEED", random.randrange(2**31)))
    print(f"seed {seed}")
    dice = random.Random(seed)
    async with (
        fault_cluster(tmp_path, {"redis_url": server.url}) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        await served(load, client)
        hits: list[tuple[list[str], str | None]] = [([table], "") for table in TABLES[::4]]
        hits += [(dice.sample(TABLES, 5), epoch) for epoch in EPOCHS]
        hits.append((TABLES, "abc"))
        last = 0
        for tables, epoch in hits:
            await redis.delete(KEYS.quarantine, KEYS.events)
            damaged = await hit(cluster, redis, client, dice, tables, epoch=epoch)
            status = await until_status(client, lambda s: s.redis_connected, 10.0)
            assert last < status.epoch < 1_000, "epochs go on where they were"
            last = status.epoch
            kept = await kinds_of(redis, KEYS.quarantine, "name")
            told = await kinds_of(redis, KEYS.events, "kind")
            # A link of a server that is not listed is not looked for; a clock may have more fields.
            unseen = {"resources", "clock", *(TABLES[-2:] if "resources" in damaged else ())}
            for table in damaged - unseen:
                assert table in {each[0] for each in kept}, (seed, table, kept)
                assert (table, "quarantined") in told, (seed, table, told)
            await served(load, client)
        load.every_request_ended()


async def test_a_leader_that_lives_mends_what_is_damaged_under_it(
    tmp_path: Path, server: RedisServer, redis: Redis
) -> None:
    async with (
        fault_cluster(tmp_path, {"redis_url": server.url}) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        before = await until_status(client, lambda s: s.redis_connected, 10.0)
        async with load.running():
            for poison in (*EPOCHS, "5.5"):
                async with redis.pipeline(transaction=True) as at_once:  # the leader writes it, too
                    at_once.delete(KEYS.epoch)
                    if poison is None:
                        at_once.rpush(KEYS.epoch, "1")
                    else:
                        at_once.set(KEYS.epoch, poison)
                    await at_once.execute()
                for table in TABLES:
                    await redis.delete(KEYS.table(table))
                    await redis.set(KEYS.table(table), "spoiled")
                await load.for_s(1.5)
        after = await until_status(client, lambda s: s.redis_connected, 10.0)
        assert (after.scheduler_id, after.epoch) == (before.scheduler_id, before.epoch)
        assert await redis.get(KEYS.epoch) == str(after.epoch).encode()
        load.nothing_was_lost()
        await nothing_is_booked(client)
        kept = {table for table, _ in await kinds_of(redis, KEYS.quarantine, "name")}
        assert {"epoch", "clock", *map(str, RedisTable)} <= kept
        await asyncio.sleep(0.1)
        assert all(member.is_running for member in cluster.members.values())
