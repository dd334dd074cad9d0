"""Redis answers but refuses writes: a standby must not take that for the end of the outage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.keys import RedisKeys
from catenary_services.redis.embedded_redis import EmbeddedRedis
from catenary_services.redis.redis_client import connect
from scheduler_harness import scheduler, until

LEADER_FIRST_S = 1.25
"""A standby leaves a free lease alone for this long after an outage (docs/redis.md)."""


async def test_a_standby_leaves_the_lease_alone_until_redis_has_taken_writes_for_a_while(
    configured: Callable[..., SchedulerSettings], server: EmbeddedRedis
) -> None:
    redis = connect(server.url, timeout_s=10.0)
    lease = RedisKeys("main").lease

    async def refusals() -> int:
        found = await redis.info("errorstats")
        return int(found.get("errorstat_NOREPLICAS", {"count": 0})["count"])

    await redis.set(lease, "leader/1", px=600_000)
    async with scheduler(configured()) as standby:
        async with redis.pipeline(transaction=True) as both:
            # The lease ends by itself, and nobody can renew or take it.
            await both.pexpire(lease, 1).config_set("min-replicas-to-write", 1).execute()
        async with asyncio.timeout(30):
            while not await refusals():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.8 * LEADER_FIRST_S)  # reads succeed meanwhile
        assert not standby.leads
        writable_s = time.monotonic()
        await redis.config_set("min-replicas-to-write", 0)
        await until(lambda: standby.leads, "leading")
        assert time.monotonic() - writable_s >= LEADER_FIRST_S
    await redis.aclose()
