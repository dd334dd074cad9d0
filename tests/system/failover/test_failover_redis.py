"""Redis restarts, comes back empty, fails over or has no room, under load: nothing is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import pytest
from redis.exceptions import RedisError

import catenary
import figures
from catenary import ClusterStatus
from catenary_scheduler.storage.keys import RedisKeys
from catenary_services.redis.redis_client import connect
from deployed.redis_servers import STATE, RedisServer, sentinel_trio
from fault_cluster import (
    FaultCluster,
    fault_cluster,
    nothing_is_booked,
    status_or_none,
    until,
    until_status,
)
from machine_faults.fault_load import Load, prepared_load

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

BEFORE_S, AFTER_S = 2.0, 4.0
AWAY_S = 3.0
CONNECTED_LIMIT_S = 3.0
SENTINEL_LIMIT_S = 10.0
LEADER_FIRST_S = 1.25
"""A standby leaves a free lease alone for this long after an outage (docs/redis.md)."""
KEYS = RedisKeys("main")


@asynccontextmanager
async def cluster_on(folder: Path, server: RedisServer) -> AsyncIterator[FaultCluster]:
    await server.start()
    try:
        async with fault_cluster(folder, {"redis_url": server.url}) as cluster:
            yield cluster
    finally:
        server.end()


async def disconnected(client: catenary.AsyncClient) -> ClusterStatus:
    return await until_status(client, lambda status: not status.redis_connected, 10.0)


async def connected(client: catenary.AsyncClient, timeout_s: float = 15.0) -> float:
    began_s = time.monotonic()
    await until_status(client, lambda status: status.redis_connected, timeout_s)
    return time.monotonic() - began_s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "kill -9"])
async def test_redis_restarts_and_nobody_notices(tmp_path: Path, number: signal.Signals) -> None:
    test = f"Redis {number.name}"
    server = RedisServer(tmp_path / "state", STATE)
    async with (
        cluster_on(tmp_path, server) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        before = await until_status(client, lambda status: status.redis_connected, 10.0)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            server.end(number)
            away = await disconnected(client)
            assert away.redis_problem
            await load.for_s(AWAY_S)
            writable_s = time.time()
            await server.start()
            back_s = await connected(client)
            await load.for_s(AFTER_S)
        await finished(test, load, fault_s, back_s, client)
        after = await until_status(client, lambda status: status.redis_connected, 5.0)
        leader_came_first(cluster, before, after, writable_s)
        assert after.plan_id == before.plan_id
        await holds_plan_and_epoch(server, after)


async def test_redis_comes_back_empty_and_is_written_anew(tmp_path: Path) -> None:
    test = "Redis empty"
    server = RedisServer(tmp_path / "state", STATE)
    async with (
        cluster_on(tmp_path, server) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        before = await until_status(client, lambda status: status.redis_connected, 10.0)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            server.end()
            shutil.rmtree(server.folder)
            await disconnected(client)
            await load.for_s(AWAY_S)
            await server.start()
            back_s = await connected(client)
            await load.for_s(AFTER_S)
        await finished(test, load, fault_s, back_s, client)
        after = await until_status(client, lambda status: status.redis_connected, 5.0)
        assert (after.scheduler_id, after.plan_id) == (before.scheduler_id, before.plan_id)
        assert after.epoch > before.epoch
        await holds_plan_and_epoch(server, after)


async def test_redis_emptied_while_it_runs_stays_with_its_leader(tmp_path: Path) -> None:
    """FLUSHALL by mistake: no outage at all, so the standby could be quicker than the leader."""
    test = "Redis FLUSHALL"
    server = RedisServer(tmp_path / "state", STATE)
    async with (
        cluster_on(tmp_path, server) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        before = await until_status(client, lambda status: status.redis_connected, 10.0)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            redis = connect(server.url)
            for _ in range(3):
                epoch = (await until_status(client, lambda s: s.redis_connected, 5.0)).epoch
                await redis.flushall()
                back = await until_status(client, lambda s, at=epoch: s.epoch > at, 10.0)
                assert back.scheduler_id == before.scheduler_id
            await redis.aclose()
            back_s = load.now_s - fault_s
            await load.for_s(AFTER_S)
        await finished(test, load, fault_s, back_s, client)
        await holds_plan_and_epoch(server, back)


async def test_sentinels_promote_a_replica_and_the_schedulers_follow(tmp_path: Path) -> None:
    test = "Sentinel fail-over"
    async with sentinel_trio(tmp_path / "redis") as trio:
        redis = {"redis_url": "redis://", "redis_sentinels": trio.addresses}
        async with (
            fault_cluster(tmp_path, redis) as cluster,
            cluster.client() as client,
            prepared_load(cluster) as load,
        ):
            before = await until_status(client, lambda status: status.redis_connected, 10.0)
            async with load.running():
                await load.for_s(BEFORE_S)
                fault_s = load.now_s
                old = await trio.master()
                old.end()
                await disconnected(client)
                await connected(client, SENTINEL_LIMIT_S + 5)
                back_s = load.now_s - fault_s
                await load.for_s(1.0)
                await old.start()  # comes back as a replica, whatever it believes at first
                await load.for_s(AFTER_S)
            await finished(test, load, fault_s, back_s, client, SENTINEL_LIMIT_S)
            new = await trio.master()
            assert new is not old
            after = await until_status(client, lambda status: status.redis_connected, 5.0)
            assert after.scheduler_id == before.scheduler_id
            assert after.epoch >= before.epoch
            await holds_plan_and_epoch(new, after)
            await until(lambda: follows(old, new), 15.0, "the old master becoming a replica")
            await holds_plan_and_epoch(new, after)


async def test_a_replica_without_the_last_epoch_never_makes_two_leaders(tmp_path: Path) -> None:
    """Redis granted an epoch and forgot it: its replica, promoted, grants the same one again.

    Both leaders have lost nothing they could notice by themselves. Agents met the first one; they
    refuse the second, which goes beyond what they have seen.
    """
    test = "stale replica"
    server = RedisServer(tmp_path / "state", STATE)
    async with (
        cluster_on(tmp_path, server) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        before = await until_status(client, lambda status: status.redis_connected, 10.0)
        old = cluster[before.scheduler_id]
        standby = next(n for n in ("scheduler-0", "scheduler-1") if n != before.scheduler_id)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            cluster[standby].kill()  # a fresh process has not seen any epoch
            old.signal(signal.SIGSTOP)
            redis = connect(server.url)
            await redis.delete(KEYS.lease)
            await redis.set(KEYS.epoch, before.epoch - 1)
            await redis.aclose()
            cluster[standby].start()
            after = await until_status(client, lambda s: s.scheduler_id == standby, 30.0)
            after = await until_status(client, lambda s: s.epoch > before.epoch, 10.0)
            old.signal(signal.SIGCONT)
            await load.for_s(AFTER_S)
            last = await until_status(client, lambda s: s.redis_connected, 10.0)
        load.report(test, fault_s)
        figures.report(test, "epoch of the second leader", after.epoch, "", f"> {before.epoch}")
        load.every_request_ended()
        assert last.scheduler_id == standby
        assert last.epoch > before.epoch
        await nothing_is_booked(client)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.parametrize("is_late", [False, True], ids=["leader returns", "leader too late"])
async def test_a_full_disk_of_redis_is_named_and_nothing_is_refused(
    tmp_path: Path, small_disk: Path, is_late: bool
) -> None:
    test = "Redis disk full, leader too late" if is_late else "Redis disk full"
    server = RedisServer(small_disk / "state", STATE)
    async with (
        cluster_on(tmp_path, server) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        before = await until_status(client, lambda status: status.redis_connected, 10.0)
        ballast = small_disk / "ballast"
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            fill(ballast)
            full = await until_status(client, lambda status: not status.redis_connected, 20.0)
            named_s = load.now_s - fault_s
            await load.for_s(AWAY_S)
            if is_late:
                cluster[before.scheduler_id].signal(signal.SIGSTOP)
            writable_s = time.time()
            ballast.unlink()
            if is_late:
                old = before.scheduler_id
                await until_status(client, lambda status: status.scheduler_id != old, 30.0)
                cluster[old].signal(signal.SIGCONT)
            back_s = await connected(client)
            await load.for_s(AFTER_S)
        figures.report(test, "named after", named_s, "s", "<= 5")
        await finished(test, load, fault_s, back_s, client)
        assert named_s <= 5.0
        assert "MISCONF" in full.redis_problem, full.redis_problem
        assert not (await until_status(client, lambda s: s.redis_connected, 5.0)).redis_problem
        after = await until_status(client, lambda status: status.redis_connected, 5.0)
        leader_came_first(cluster, before, after, writable_s)
        assert after.plan_id == before.plan_id
        assert after.epoch > before.epoch  # the lease ended while the disk was full
        await holds_plan_and_epoch(server, after)
        for name in ("scheduler-0", "scheduler-1"):
            lines = cluster[name].log.read_text(errors="replace").count("redis_lost")
            figures.report(test, f"log lines of {name} about it", lines, "", "<= 5")
            assert lines <= 5


def fill(file: Path) -> None:
    """Leaves no room at all."""
    with file.open("wb", buffering=0) as ballast:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    ballast.write(b"\0" * size)
            except OSError:
                continue


async def finished(
    test: str,
    load: Load,
    fault_s: float,
    back_s: float,
    client: catenary.AsyncClient,
    limit_s: float = CONNECTED_LIMIT_S,
) -> None:
    load.report(test, fault_s)
    figures.report(test, "Redis connected again after", back_s, "s", f"<= {limit_s:g}")
    load.nothing_was_lost()
    assert back_s <= limit_s
    assert await status_or_none(client) is not None
    await nothing_is_booked(client)


def leader_came_first(
    cluster: FaultCluster, before: ClusterStatus, after: ClusterStatus, writable_s: float
) -> None:
    """Checks that the standby left the lease to whoever led before an outage of Redis.

    On a busy machine the leader may be too late for it, and the service goes on with the standby.
    `writable_s` is a moment, in seconds since 1970, from which on Redis took writes at the earliest.
    """
    if after.scheduler_id == before.scheduler_id:
        return
    lines = cluster[after.scheduler_id].log.read_text(errors="replace").splitlines()
    began = [line.split()[0] for line in lines if "] leading " in line]
    led_s = datetime.fromisoformat(began[-1]).timestamp()
    assert led_s - writable_s >= LEADER_FIRST_S


async def holds_plan_and_epoch(server: RedisServer, status: ClusterStatus) -> None:
    """Redis has what the leader has."""
    redis = connect(server.url)
    try:
        async with asyncio.timeout(10):
            while True:
                epoch = int(await redis.get(KEYS.epoch) or 0)
                plan = (await redis.hget(KEYS.table("plan"), "active_id") or b"").decode()
                lease = (await redis.get(KEYS.lease) or b"").decode()
                if (epoch, plan) == (status.epoch, status.plan_id):
                    assert lease.startswith(f"{status.scheduler_id}/")
                    return
                await asyncio.sleep(0.05)
    finally:
        await redis.aclose()


async def follows(old: RedisServer, new: RedisServer) -> bool:
    redis = connect(old.url, retries=0)
    try:
        facts = await redis.info("replication")
    except RedisError:
        return False
    finally:
        await redis.aclose()
    return facts["role"] == "slave" and int(facts["master_port"]) == new.port
