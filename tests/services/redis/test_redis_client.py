"""Clients of real servers: with Sentinel, with TLS, with a password that changes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
import trustme
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from catenary_services.errors import InvalidInput
from catenary_services.redis.redis_client import RedisAddress, connect, problem_of
from deployed.redis_servers import STATE, RedisServer, sentinel_trio, tls_server_binary


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def secured(folder: Path, authority: trustme.CA, *more: str) -> RedisServer:
    """A server that speaks TLS only, and asks clients for a certificate."""
    binary = tls_server_binary()
    folder.mkdir(parents=True, exist_ok=True)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name in ("server", "client"):
        issued = authority.issue_cert("127.0.0.1", f"{name}.internal")
        issued.private_key_pem.write_to_path(str(folder / f"{name}-key.pem"))
        for number, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(str(folder / f"{name}.pem"), append=number > 0)
    server = RedisServer(folder, binary=binary)
    server.lines = [
        "port 0",
        f"tls-port {server.port}",
        f"tls-cert-file {folder}/server.pem",
        f"tls-key-file {folder}/server-key.pem",
        f"tls-ca-cert-file {folder}/ca.pem",
        "tls-auth-clients yes",
        *more,
    ]
    return server


def over_tls(server: RedisServer, **changed: Path | None) -> Redis:
    folder = server.folder
    files: dict[str, Path | None] = {
        "ca_file": folder / "ca.pem",
        "cert_file": folder / "client.pem",
        "key_file": folder / "client-key.pem",
    }
    url = server.url.replace("redis://", "rediss://")
    return connect(RedisAddress(url, **(files | changed)), timeout_s=2.0, retries=0)


async def started(server: RedisServer) -> None:
    await server.start(answering=False)
    client = over_tls(server)
    async with asyncio.timeout(30):
        while True:
            try:
                await client.ping()
                break
            except RedisError:
                await asyncio.sleep(0.02)
    await client.aclose()


async def test_over_tls_both_sides_show_a_certificate(
    tmp_path: Path, authority: trustme.CA
) -> None:
    server = secured(tmp_path / "tls", authority)
    await started(server)
    try:
        client = over_tls(server)
        assert await client.set("a", "b")
        assert await client.get("a") == b"b"
        await client.aclose()
        stranger = trustme.CA(key_type=trustme.KeyType.ECDSA)
        stranger.cert_pem.write_to_path(str(tmp_path / "other.pem"))
        for wrong in ({"ca_file": tmp_path / "other.pem"}, {"cert_file": None, "key_file": None}):
            refused = over_tls(server, **wrong)
            with pytest.raises((RedisConnectionError, RedisTimeout)):
                await refused.ping()
            await refused.aclose()
        plain = connect(server.url, timeout_s=1.0, retries=0)
        with pytest.raises((RedisConnectionError, RedisTimeout)):
            await plain.ping()
        await plain.aclose()
    finally:
        server.end()


async def test_a_certificate_for_another_name_is_refused(
    tmp_path: Path, authority: trustme.CA
) -> None:
    server = secured(tmp_path / "tls", authority)
    issued = authority.issue_cert("elsewhere.internal")
    await started(server)
    server.end()
    issued.private_key_pem.write_to_path(str(server.folder / "server-key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(server.folder / "server.pem"))
    await server.start(answering=False)
    try:
        client = over_tls(server)
        async with asyncio.timeout(30):
            while True:
                with pytest.raises(RedisConnectionError) as caught:
                    await client.ping()
                if "CERTIFICATE" in str(caught.value).upper():
                    break
                await asyncio.sleep(0.02)
        await client.aclose()
    finally:
        server.end()


async def test_the_password_is_read_for_every_connection(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("the first one\n")
    server = RedisServer(tmp_path / "redis", ["requirepass 'the first one'"])
    await server.start(answering=False)
    try:
        address = RedisAddress(server.url, password_file=file)
        client = connect(address, retries=50)
        assert await client.ping()
        await client.config_set("requirepass", "the second one")
        await client.connection_pool.disconnect()
        refused = connect(address, retries=0)
        with pytest.raises(AuthenticationError):
            await refused.ping()
        await refused.aclose()
        file.write_text("the second one")
        assert await client.ping()
        await client.aclose()
    finally:
        server.end()


@pytest.mark.system  # a fail-over takes seconds
async def test_behind_sentinels_the_master_is_found_and_found_again(tmp_path: Path) -> None:
    async with sentinel_trio(tmp_path) as trio:
        where = RedisAddress("redis:///3", sentinels=tuple(trio.addresses))
        client = connect(where, timeout_s=1.0, retries=1)
        assert await client.set("a", "b")
        asking = connect(trio.sentinels[0].url)
        await asking.execute_command("SENTINEL", "FAILOVER", "catenary")
        old = trio.servers[0]
        async with asyncio.timeout(15):
            while await trio.master() is old:
                await asyncio.sleep(0.05)
            direct = connect(trio.servers[1].url.replace("/0", "/3"))
            while await direct.get("a") != b"c":
                # The old master still runs: it takes writes that get lost, then refuses them.
                with suppress(RedisError):
                    await client.set("a", "c")
                await asyncio.sleep(0.05)
        for each in (direct, asking, client):
            await each.aclose()


async def test_one_sentinel_is_enough_and_none_is_named(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis", STATE)
    await server.start()
    try:
        gone = RedisAddress("redis://", sentinels=("127.0.0.1:1", "127.0.0.1:2"))
        client = connect(gone, timeout_s=0.5, retries=0)
        with pytest.raises(RedisConnectionError) as caught:
            await client.ping()
        assert problem_of(caught.value)[0] == "connection"
        await client.aclose()
    finally:
        server.end()


@pytest.mark.parametrize(
    ("address", "what"),
    [
        (RedisAddress("redis://", sentinels=("host:port",)), "redis_sentinels"),
        (RedisAddress("redis:///main", sentinels=("host:1",)), "database"),
        (RedisAddress("http://host"), "redis_url"),
        (RedisAddress("redis://host", password_file=Path("/nonexistent")), "cannot be read"),
        (RedisAddress("rediss://host", ca_file=Path("/nonexistent")), "no file"),
    ],
)
async def test_a_wrong_address_is_named(address: RedisAddress, what: str) -> None:
    with pytest.raises(InvalidInput, match=what):
        connect(address)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (
            ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
            "disk_full",
        ),
        (ResponseError("OOM command not allowed"), "memory_full"),
        (ResponseError("READONLY You can't write against a read only replica."), "read_only"),
        (ResponseError("WRONGTYPE what"), "refused"),
        (AuthenticationError("WRONGPASS"), "denied"),
        (RedisTimeout("Timeout reading"), "timeout"),
        (RedisConnectionError("refused"), "connection"),
        (OSError(), "connection"),
    ],
)
def test_what_is_wrong_gets_a_word_and_a_line(failure: BaseException, kind: str) -> None:
    word, text = problem_of(failure)
    assert word == kind
    assert text
    assert "\n" not in text
