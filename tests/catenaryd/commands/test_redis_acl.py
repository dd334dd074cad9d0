"""Each user of the ACL file, on a real server: what it must, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from catenary_scheduler.storage.journal import JournalChanges
from catenary_scheduler.storage.keys import RedisKeys, RedisTable
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.store import Store
from catenary_services.errors import InvalidInput
from catenary_services.redis.redis_client import RedisAddress, connect
from catenaryd.command_line import cli
from catenaryd.commands.redis_acl import HEALTH, SCHEDULER, USERS, VIEW, acl_file
from deployed.redis_servers import RedisServer

KEYS = RedisKeys("main")
LEASE, PLAN = KEYS.lease, KEYS.table(RedisTable.PLAN)
DENIED = (
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "dir", "/"),
    ("ACL", "LIST"),
    ("ACL", "WHOAMI"),
    ("INFO",),
    ("SHUTDOWN",),
    ("SAVE",),
    ("REPLICAOF", "NO", "ONE"),
    ("MODULE", "LIST"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("MONITOR",),
    ("PUBLISH", "c", "x"),
    ("FUNCTION", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("MIGRATE", "h", "1", "k", "0", "1"),
    ("RANDOMKEY",),
    ("DBSIZE",),
)
WRITES = (
    ("SET", LEASE, "x"),
    ("DEL", PLAN),
    ("HSET", PLAN, "a", "b"),
    ("HDEL", PLAN, "a"),
    ("PEXPIRE", PLAN, "9"),
    ("EVAL", "return 1", "0"),
    ("XADD", KEYS.events, "*", "a", "b"),
)
ELSEWHERE = (
    ("GET", "other"),
    ("GET", "catenary:{other}:lease"),
    ("GET", "catenary:{main"),
    ("HGETALL", "catenary:{mainly}:plan"),
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    users = tmp_path / "users.acl"
    users.write_text(acl_file("main", {user: f"password of {user}" for user in USERS}))
    running = RedisServer(tmp_path / "redis", [f'aclfile "{users}"'])
    await running.start(answering=False)
    ping = as_user(running, HEALTH, retries=50)
    assert await ping.ping()
    await ping.aclose()
    yield running
    running.end()


def as_user(server: RedisServer, user: str, retries: int = 0) -> Redis:
    file = server.folder / f"{user}.txt"
    file.write_text(f"password of {user}\n")
    url = server.url.replace("redis://", f"redis://{user}@")
    return connect(RedisAddress(url, password_file=file), retries=retries)


async def refused(redis: Redis, command: tuple[str, ...]) -> bool:
    try:
        await redis.execute_command(*command)
    except NoPermissionError:
        return True
    return False


async def allowed_of(redis: Redis, commands: tuple[tuple[str, ...], ...]) -> list[str]:
    return [" ".join(each) for each in commands if not await refused(redis, each)]


async def test_the_scheduler_can_lead_and_write_everything(server: RedisServer) -> None:
    redis = as_user(server, SCHEDULER)
    for keys in (KEYS, RedisKeys("main", 3, 4)):
        lease, store = Lease(redis, keys, "s/1", 2.0), Store(redis, keys)
        assert await lease.try_acquire()
        assert await lease.renew()
        await lease.want()
        assert (await lease.look()).holder == "s/1"
        tables = {
            RedisTable.PLAN: {"active_id": "x", "gone": None},
            "book:gpu/a": {"1:0": "1 2 3 0"},
        }
        await store.apply(lease, JournalChanges(tables, [{"kind": "leader"}], replace=True))
        assert (await store.load()).plan.active_id == "x"
        await lease.release()
        assert not await lease.is_held()
    await redis.aclose()


async def test_no_user_can_do_more_than_its_work(server: RedisServer) -> None:
    allowed = {
        SCHEDULER: DENIED + ELSEWHERE,
        VIEW: DENIED + ELSEWHERE + WRITES,
        HEALTH: DENIED + ELSEWHERE + WRITES + (("GET", LEASE), ("HGETALL", PLAN), ("TIME",)),
    }
    for user, commands in allowed.items():
        redis = as_user(server, user)
        assert await redis.ping()
        assert await allowed_of(redis, commands) == [], user
        await redis.aclose()


async def test_a_script_gets_no_further_than_its_user(server: RedisServer) -> None:
    redis = as_user(server, SCHEDULER)
    for source in ("return redis.call('GET', 'other')", "return redis.call('DBSIZE')"):
        with pytest.raises(Exception, match=r"can.t (access|run|execute)|[Nn]o permissions"):
            await redis.eval(source, 0)
    await redis.aclose()


async def test_the_viewer_reads(server: RedisServer) -> None:
    writer, viewer = as_user(server, SCHEDULER), as_user(server, VIEW)
    await writer.hset(PLAN, "active", "x")
    assert await viewer.hgetall(PLAN) == {b"active": b"x"}
    assert await viewer.xrevrange(KEYS.events) == []
    await writer.aclose()
    await viewer.aclose()


async def test_nobody_comes_in_without_a_password(server: RedisServer) -> None:
    for url in (server.url, server.url.replace("redis://", f"redis://{SCHEDULER}:wrong@")):
        redis = connect(url, retries=0)
        with pytest.raises(AuthenticationError):
            await redis.ping()
        await redis.aclose()


async def test_a_new_password_in_the_file_is_used_for_the_next_connection(
    server: RedisServer,
) -> None:
    redis = as_user(server, VIEW)
    assert await redis.ping()
    users = server.folder.parent / "users.acl"
    users.write_text(acl_file("main", {VIEW: "another one"}))
    (server.folder / f"{VIEW}.txt").write_text("another one")
    admin = connect(server.url, retries=0)
    await admin.aclose()
    # The old connection stays; only a new one has to say who it is.
    server.end()
    await server.start(answering=False)
    again = as_user_of(server, VIEW)
    assert await again.ping()
    await redis.aclose()
    await again.aclose()


def as_user_of(server: RedisServer, user: str) -> Redis:
    url = server.url.replace("redis://", f"redis://{user}@")
    return connect(RedisAddress(url, password_file=server.folder / f"{user}.txt"), retries=50)


def test_the_command_prints_hashes_and_never_a_password(tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("a long password\n")
    result = CliRunner().invoke(cli, ["redis-acl", "--password-file", f"{SCHEDULER}={file}"])
    assert result.exit_code == 0
    assert result.output.startswith("user default off ")
    assert f"user {SCHEDULER} on #" in result.output
    assert "password" not in result.output
    assert result.output == acl_file("main", {SCHEDULER: "a long password"})


@pytest.mark.parametrize(
    ("cluster", "user", "password"),
    [
        ("main", "nobody", "long enough"),
        ("main", VIEW, ""),
        ("main", VIEW, "short"),
        ("main", VIEW, "two\nlines of it"),
        ("a b", VIEW, "long enough"),
        ("*", VIEW, "long enough"),
    ],
)
def test_what_would_not_be_safe_is_refused(cluster: str, user: str, password: str) -> None:
    with pytest.raises(InvalidInput):
        acl_file(cluster, {user: password})
