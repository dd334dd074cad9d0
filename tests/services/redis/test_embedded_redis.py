from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import redis.exceptions

from catenary_services.errors import InvalidInput
from catenary_services.redis.embedded_redis import EmbeddedRedis
from catenary_services.redis.redis_client import connect
from source_roots import IMPORT_PATH


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(tmp_path / "redis")
    await embedded.start()
    yield embedded
    await embedded.stop()


async def test_serves_what_the_scheduler_needs(server: EmbeddedRedis) -> None:
    client = connect(server.url)
    assert await client.eval("return redis.call('INCR', KEYS[1])", 1, "epoch") == 1
    assert await client.xadd("{m}events", {b"kind": b"x"}, maxlen=10, approximate=True)
    facts = await client.config_get("append*")
    assert (facts["appendonly"], facts["appendfsync"]) == ("yes", "everysec")
    assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
    await client.aclose()


async def test_killed_server_comes_back_at_the_same_address_with_its_data(
    server: EmbeddedRedis,
) -> None:
    client = connect(server.url)
    await client.set("key", b"value")
    url, pid = server.url, server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert await server.wait() == -signal.SIGKILL
    assert not server.running
    assert await server.start() == url
    assert server.pid != pid
    assert await client.get("key") == b"value"  # the old client finds the new server
    await client.aclose()


async def test_new_object_over_the_folder_finds_data_and_address(tmp_path: Path) -> None:
    first = EmbeddedRedis(tmp_path)
    url = await first.start()
    client = connect(url)
    await client.set("key", b"value")
    await first.stop()
    await first.stop()
    second = EmbeddedRedis(tmp_path)
    try:
        assert await second.start() == url
        assert await second.start() == url
        assert await client.get("key") == b"value"
    finally:
        await client.aclose()
        await second.stop()


async def test_truncated_file_after_a_crash_is_no_obstacle(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    await server.start()
    client = connect(server.url)
    for number in range(100):
        await client.set(f"key{number}", b"x" * 100)
    os.kill(server.pid or 0, signal.SIGKILL)
    await server.wait()
    (journal,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    os.truncate(journal, journal.stat().st_size - 7)
    try:
        await server.start()
        assert await client.get("key98") == b"x" * 100
    finally:
        await client.aclose()
        await server.stop()


async def test_password_is_needed_and_kept_private(server: EmbeddedRedis, tmp_path: Path) -> None:
    assert server.pid is not None
    assert server.url.split("@")[0].split(":")[-1] not in " ".join(
        psutil.Process(server.pid).cmdline()
    )
    mode = (tmp_path / "redis" / "identity.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    stranger = connect("redis://" + server.url.split("@")[1])
    with pytest.raises(redis.exceptions.AuthenticationError):
        await stranger.get("key")
    await stranger.aclose()


async def test_folder_in_use_is_refused(server: EmbeddedRedis, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        await EmbeddedRedis(tmp_path / "redis").start()
    assert server.running


async def test_given_port_is_used(tmp_path: Path, free_port: int) -> None:
    server = EmbeddedRedis(tmp_path, port=free_port)
    try:
        assert f":{free_port}/" in await server.start()
    finally:
        await server.stop()


async def test_server_that_outlived_its_parent_is_replaced(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from catenary_services.redis.embedded_redis import EmbeddedRedis\n"
        "async def main():\n"
        "    server = EmbeddedRedis(pathlib.Path(sys.argv[1]))\n"
        "    print(await server.start(), server.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        url, pid = parent.stdout.readline().split()
        client = connect(url)
        await client.set("key", b"value")
        parent.kill()
    orphan = psutil.Process(int(pid))
    server = EmbeddedRedis(tmp_path)
    try:
        assert orphan.is_running()
        assert await server.start() == url
        assert server.pid != orphan.pid
        assert await client.get("key") == b"value"
    finally:
        await client.aclose()
        await server.stop()
        with suppress(psutil.NoSuchProcess):
            orphan.kill()


async def test_client_gives_up_on_a_server_that_hangs(server: EmbeddedRedis) -> None:
    client = connect(server.url, timeout_s=0.1, retries=1)
    await client.ping()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            with pytest.raises(redis.exceptions.TimeoutError):
                await client.get("key")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await client.get("key") is None
    await client.aclose()
