"""Wall clocks that are set an hour ahead or back, process by process, under load."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import catenary
import figures
from deployed.redis_servers import STATE, RedisServer
from fault_cluster import (
    FaultCluster,
    fault_cluster,
    nothing_is_booked,
    status_or_none,
    until_status,
)
from machine_faults.clock_step import SteppedClock
from machine_faults.fault_load import Load, prepared_load

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

HOUR_S = 3600
BEFORE_S, AFTER_S = 2.0, 3.0
PROCESSES = ("gateway-0", "agent-1", "agent-2", "scheduler-0", "scheduler-1")


@asynccontextmanager
async def world(
    folder: Path, clocks: dict[str, SteppedClock]
) -> AsyncIterator[tuple[FaultCluster, RedisServer, catenary.AsyncClient, Load]]:
    server = RedisServer(folder / "state", STATE)
    await started(server, clocks["redis"])
    environments = {name: clock.environment for name, clock in clocks.items() if name != "redis"}
    try:
        async with (
            fault_cluster(folder, {"redis_url": server.url}, environments=environments) as cluster,
            cluster.client() as client,
            prepared_load(cluster) as load,
        ):
            yield cluster, server, client, load
    finally:
        server.end()


async def started(server: RedisServer, clock: SteppedClock) -> None:
    own = dict(os.environ)
    os.environ.update(clock.environment)
    try:
        await server.start()
    finally:
        os.environ.clear()
        os.environ.update(own)


@pytest.fixture
def clocks(tmp_path: Path) -> dict[str, SteppedClock]:
    return {name: SteppedClock(tmp_path / "clocks", name) for name in (*PROCESSES, "redis")}


async def test_clocks_of_our_processes_do_not_matter(
    tmp_path: Path, clocks: dict[str, SteppedClock]
) -> None:
    test = "clock of a process"
    async with world(tmp_path, clocks) as (cluster, _, client, load):
        before = await until_status(client, lambda status: bool(status.scheduler_id), 5.0)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            for name in PROCESSES:
                for step_s in (HOUR_S, -HOUR_S, 0):
                    clocks[name].step(step_s)
                    await load.for_s(1.0)
            after = await until_status(client, lambda status: bool(status.scheduler_id), 5.0)
        load.report(test, fault_s)
        load.nothing_was_lost()
        assert (after.scheduler_id, after.epoch) == (before.scheduler_id, before.epoch)
        assert {agent.state for agent in after.agents} == {"ready"}
        assert await status_or_none(client) is not None
        assert cluster.members
        await nothing_is_booked(client)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["ahead", "back"])
async def test_the_clock_of_redis_ends_no_term_for_long(
    tmp_path: Path, clocks: dict[str, SteppedClock], step_s: int
) -> None:
    test = f"clock of Redis {step_s:+d} s"
    async with world(tmp_path, clocks) as (_, _, client, load):
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            clocks["redis"].step(step_s)
            began_s, away_s = time.monotonic(), 0.0
            while time.monotonic() - began_s < 5.0:
                asked_s = time.monotonic()
                status = await status_or_none(client)
                if status is None or not status.scheduler_id:
                    away_s += time.monotonic() - asked_s
                await asyncio.sleep(0.05)
            await load.for_s(AFTER_S)
        load.report(test, fault_s)
        figures.report(test, "nobody led for", away_s, "s", "<= 3")
        load.nothing_was_lost()
        assert away_s <= 3.0
        await nothing_is_booked(client)


async def test_a_leader_killed_as_the_clock_of_redis_goes_back_is_replaced(
    tmp_path: Path, clocks: dict[str, SteppedClock]
) -> None:
    """Its lease would last for an hour, and what it booked would, too."""
    test = "clock of Redis back, leader killed"
    async with world(tmp_path, clocks) as (cluster, _, client, load):
        before = await until_status(client, lambda status: bool(status.scheduler_id), 5.0)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            cluster[before.scheduler_id].kill()
            clocks["redis"].step(-HOUR_S)
            began_s = time.monotonic()
            await until_status(
                client, lambda s: s.scheduler_id not in ("", before.scheduler_id), 30.0
            )
            taken_s = time.monotonic() - began_s
            await load.for_s(AFTER_S)
        load.report(test, fault_s)
        figures.report(test, "standby leads after", taken_s, "s", "<= 9")
        load.every_request_ended()
        assert taken_s <= 9.0
        await nothing_is_booked(client)
