"""Real Redis servers as tests need them: with Sentinel, with TLS, with users, on a small disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from catenary_services.redis.embedded_redis import find_server
from catenary_services.redis.redis_client import connect
from catenaryd.local.local_cluster import free_port
from fault_cluster import Place

SERVICE = "catenary"
_START_S = 10.0


class RedisServer:
    """One server over one folder; `lines` are its configuration beyond the usual.

    `place` is where it runs, `variables` its environment beyond the usual.
    """

    def __init__(
        self,
        folder: Path,
        lines: Sequence[str] = (),
        *,
        port: int = 0,
        binary: Path | None = None,
        place: Place | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.binary = binary or find_server()
        self.lines = list(lines)
        self.place = place or Place()
        self._variables = dict(variables or {})
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.place.host}:{self.port}/0"

    async def start(self, *, mode: Sequence[str] = (), answering: bool = True) -> None:
        """Starts it and, with `answering`, waits until it answers a client without a password."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "redis.conf"
        if not file.exists():  # a Sentinel rewrites its own
            file.write_text("\n".join([*self._usual(), *self.lines]) + "\n")
        self.process = subprocess.Popen(
            [*self.place.prefix, self.binary, file, *mode],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **self._variables},
        )
        if answering:
            await answers(self.url, self.process)

    def _usual(self) -> list[str]:
        return [
            f"bind {self.place.host}",
            f"port {self.port}",
            f'dir "{self.folder.resolve()}"',
            "logfile redis.log",
            "daemonize no",
        ]

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it with a signal and waits for that."""
        if self.process is not None and self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(number)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def log(self) -> str:
        file = self.folder / "redis.log"
        return file.read_text(errors="replace") if file.exists() else ""


async def answers(url: str, process: subprocess.Popen[bytes]) -> None:
    """Waits until a server answers a ping."""
    client = connect(url, timeout_s=1.0, retries=0)
    try:
        async with asyncio.timeout(_START_S):
            while process.poll() is None:
                try:
                    await client.ping()
                    return
                except RedisError:
                    await asyncio.sleep(0.02)
    finally:
        await client.aclose()
    raise AssertionError(f"the Redis server ended with {process.returncode}")


STATE = ("appendonly yes", "appendfsync everysec", 'save ""', "maxmemory-policy noeviction")


class SentinelTrio:
    """A master, a replica and three Sentinels that watch them."""

    def __init__(self, folder: Path, *, down_after_ms: int = 1_000) -> None:
        binary = _binary_with_sentinel()
        replication = ["repl-diskless-sync-delay 0", "repl-timeout 5"]
        self.servers = [RedisServer(folder / "redis-0", [*STATE, *replication], binary=binary)]
        leader = self.servers[0]
        self.servers.append(
            RedisServer(
                folder / "redis-1",
                [*STATE, *replication, f"replicaof 127.0.0.1 {leader.port}"],
                binary=binary,
            )
        )
        watching = [
            f"sentinel monitor {SERVICE} 127.0.0.1 {leader.port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}",
            f"sentinel failover-timeout {SERVICE} 5000",
            f"sentinel parallel-syncs {SERVICE} 1",
        ]
        self.sentinels = [
            RedisServer(folder / f"sentinel-{n}", watching, binary=binary) for n in range(3)
        ]

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels]

    def client(self) -> Redis:
        from catenary_services.redis.redis_client import RedisAddress

        where = RedisAddress("redis://", sentinels=tuple(self.addresses))
        return connect(where, timeout_s=1.0, retries=1)

    async def start(self) -> None:
        for server in self.servers:
            await server.start()
        for sentinel in self.sentinels:
            await sentinel.start(mode=["--sentinel"])
        asking = connect(self.sentinels[0].url, timeout_s=1.0, retries=0)
        try:
            async with asyncio.timeout(_START_S):
                while not await self._is_complete(asking):
                    await asyncio.sleep(0.05)
        finally:
            await asking.aclose()

    async def _is_complete(self, asking: Redis) -> bool:
        state = await asking.execute_command("SENTINEL", "MASTER", SERVICE)
        facts = {_text(name): _text(value) for name, value in _pairs(state)}
        return facts.get("num-slaves") == "1" and facts.get("num-other-sentinels") == "2"

    async def master(self) -> RedisServer:
        """Returns the server the Sentinels take for the master."""
        asking = connect(self.sentinels[0].url, timeout_s=1.0, retries=0)
        try:
            answer = await asking.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        finally:
            await asking.aclose()
        port = int(answer[1])
        return next(server for server in self.servers if server.port == port)

    def end(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.end()


def _pairs(state: object) -> list[tuple[object, object]]:
    if isinstance(state, dict):
        return list(state.items())
    assert isinstance(state, list)
    return list(zip(state[::2], state[1::2], strict=True))


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@asynccontextmanager
async def sentinel_trio(folder: Path) -> AsyncIterator[SentinelTrio]:
    trio = SentinelTrio(folder)
    try:
        await trio.start()
        yield trio
    finally:
        trio.end()


def _binary_with_sentinel() -> Path:
    """Any server becomes a Sentinel with `--sentinel`."""
    return find_server()


def tls_server_binary() -> Path:
    """Returns a Redis or Valkey that can do TLS; skips the test where there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is None:
            continue
        linked = subprocess.run(["ldd", found], capture_output=True, text=True, check=False)
        if "libssl" in linked.stdout:
            return Path(found)
    pytest.skip("no redis-server or valkey-server on PATH was built with TLS")
