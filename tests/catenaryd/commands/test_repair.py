"""`catenaryd repair`, on a store that no scheduler looks after."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis.asyncio import Redis

from catenary_scheduler.storage.journal import JournalChanges
from catenary_scheduler.storage.keys import RedisKeys, RedisTable
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.store import Store
from catenary_services.redis.embedded_redis import EmbeddedRedis
from catenaryd.command_line import cli
from scheduling_cases.stored_tables import GOOD, raw_table

KEYS = RedisKeys("test")


async def repaired(server: EmbeddedRedis, *flags: str) -> Result:
    arguments = ["repair", "--redis-url", server.url, "--cluster", "test", *flags]
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


@pytest.fixture
async def left_behind(redis: Redis) -> None:
    lease = Lease(redis, KEYS, "gone", 60.0)
    assert await lease.try_acquire(beyond=41)
    tables: dict[str, Any] = {table: dict(fields) for table, fields in GOOD.items()}
    await Store(redis, KEYS).apply(lease, JournalChanges(tables, replace=True))
    await lease.release()


async def test_a_whole_store_has_nothing_to_repair(
    server: EmbeddedRedis, left_behind: None
) -> None:
    result = await repaired(server, "--json")
    assert result.exit_code == 0, result.output
    (group,) = json.loads(result.output)["groups"]
    assert group == {"group": 0, "leader": "", "epoch": 42, "quarantined": 0, "damage": []}
    assert "nothing unreadable" in (await repaired(server)).output


async def test_damage_is_named_and_put_away_on_demand(
    server: EmbeddedRedis, redis: Redis, left_behind: None
) -> None:
    await redis.set(KEYS.epoch, 2**64 - 1)
    await redis.hset(KEYS.table(RedisTable.PLAN), "active", "{")  # type: ignore[misc]
    await redis.delete(KEYS.table(RedisTable.AGENTS))
    await redis.rpush(KEYS.table(RedisTable.AGENTS), "x")  # type: ignore[misc]
    await redis.set(KEYS.quarantine, "x")
    await redis.set(KEYS.lease, "for ever")
    found = await repaired(server, "--json")
    assert found.exit_code == 1
    (group,) = json.loads(found.output)["groups"]
    named = {("epoch", ""), ("plan", "active"), ("agents", ""), ("quarantine", ""), ("lease", "")}
    assert {(each["table"], each["name"]) for each in group["damage"]} == named
    assert await redis.get(KEYS.epoch) == str(2**64 - 1).encode()  # only looked at
    shown = await repaired(server, "--apply")
    assert shown.exit_code == 0
    assert all(table in shown.output for table, _ in named)
    kept = [fields for _, fields in await redis.xrange(KEYS.quarantine)]
    assert {each[b"table"].decode() for each in kept} == {"epoch", "plan", "agents", "lease"}
    again = await repaired(server, "--json")
    assert again.exit_code == 0
    assert json.loads(again.output)["groups"][0]["quarantined"] == 4
    assert "active" not in await raw_table(redis, KEYS, RedisTable.PLAN)
    lease = Lease(redis, KEYS, "next", 60.0)
    assert await lease.try_acquire()
    assert lease.epoch == 43


async def test_a_server_that_does_not_answer_is_said_in_a_sentence(server: EmbeddedRedis) -> None:
    await server.stop()
    result = await repaired(server)
    assert "Redis" in str(result.exception)
