"""A Redis client whose calls never hang, and which finds a restarted server again.

It also works behind Sentinel, with TLS, and with a password from a file. The file is read for every
new connection: an exchanged password or certificate needs no restart.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ExponentialWithJitterBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeout

from catenary_services.errors import InvalidInput

MAX_CONNECTIONS = 32
"""The most connections of one process. More concurrent callers are a bug, and get an error."""
SENTINEL_PORT = 26379
_TLS_SCHEME = "rediss"
_LONGEST_PROBLEM = 160


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The address of a Redis, with everything needed to log in."""

    url: str
    """"redis://", "rediss://" (TLS) or "unix://", with user, password and database, if any. Its
    host and port are ignored if there are `sentinels`."""
    password_file: Path | None = None
    """File with the password of the user in `url`; read anew for every connection."""
    ca_file: Path | None = None
    """PEM file of the authorities that may sign the server's certificate; None for those of the
    system."""
    cert_file: Path | None = None
    """PEM file of the certificate chain shown to a server that asks for one."""
    key_file: Path | None = None
    """PEM file of the key of `cert_file`."""
    sentinels: tuple[str, ...] = ()
    """host:port of each Sentinel; empty if `url` is the server."""
    sentinel_service: str = "catenary"
    """Name of the master at the Sentinels."""
    sentinel_password_file: Path | None = None
    """File with the password of the Sentinels themselves, if they have one."""


def connect(address: str | RedisAddress, *, timeout_s: float = 2.0, retries: int = 3) -> Redis:
    """Returns a client for a URL or an address, which connects when first used.

    Replies are bytes. Errors are those of redis-py (`redis.exceptions.RedisError`).

    Args:
        address: A URL, with password and database number if any, or an address with further
            settings.
        timeout_s: Time-out of connecting, and of each reply.
        retries: Number of repetitions of a command after a broken connection or a time-out; 0 for
            commands that must not run twice.

    Raises:
        InvalidInput: The URL, a Sentinel's address or a file is wrong.
    """
    where = RedisAddress(address) if isinstance(address, str) else address
    options: dict[str, Any] = {
        "protocol": 3,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 15,
        "max_connections": MAX_CONNECTIONS,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.25), retries),
    }
    if where.sentinels:
        return _behind_sentinels(where, options)
    url, options = _with_password(where, options)
    options |= _tls_of(where)
    try:
        client: Redis = Redis.from_url(url, **options)
    except ValueError as error:
        raise InvalidInput("redis_url", str(error)) from None
    return client


def problem_of(failure: BaseException) -> tuple[str, str]:
    """Returns the failure of Redis as a word for a metric and as a line for people.

    The word is one of "disk_full", "memory_full", "read_only", "denied", "timeout", "connection"
    and "refused".
    """
    text = (str(failure) or type(failure).__name__).splitlines()[0][:_LONGEST_PROBLEM]
    if isinstance(failure, AuthenticationError | NoPermissionError):
        return "denied", text
    if isinstance(failure, OutOfMemoryError):
        return "memory_full", text
    if isinstance(failure, ReadOnlyError):
        return "read_only", text
    if isinstance(failure, ResponseError):
        word = text.split(" ", 1)[0]
        by_word = {"MISCONF": "disk_full", "OOM": "memory_full", "READONLY": "read_only"}
        return by_word.get(word, "refused"), text
    if isinstance(failure, RedisTimeout | TimeoutError):
        return "timeout", text
    return "connection", text


class _PasswordOfFile(CredentialProvider):
    """Credentials of Redis whose password is read from a file for every connection."""

    def __init__(self, user: str, file: Path) -> None:
        self._user = user
        self._file = file
        self.get_credentials()  # reports a missing file at start

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Returns user and password, or the password alone."""
        password = _password_in(self._file)
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Returns the same as `get_credentials`; reading one line needs no thread."""
        return self.get_credentials()


def _password_in(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("redis_password_file", f"cannot be read: {error}") from None


def _with_password(where: RedisAddress, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the URL without password, and options that name the file to read it from."""
    if where.password_file is None:
        return where.url, options
    parts = urlsplit(where.url)
    user = unquote(parts.username or "")
    host = parts.netloc.rpartition("@")[2]
    bare = urlunsplit(parts._replace(netloc=host))
    return bare, {**options, "credential_provider": _PasswordOfFile(user, where.password_file)}


def _tls_of(where: RedisAddress) -> dict[str, Any]:
    if urlsplit(where.url).scheme != _TLS_SCHEME:
        return {}
    files = {
        "ssl_ca_certs": where.ca_file,
        "ssl_certfile": where.cert_file,
        "ssl_keyfile": where.key_file,
    }
    for name, file in files.items():
        if file is not None and not file.is_file():
            raise InvalidInput(name.replace("ssl_", "redis "), f"there is no file {file}")
    given = {name: str(file) for name, file in files.items() if file is not None}
    return {**given, "ssl_min_version": ssl.TLSVersion.TLSv1_2}


def _behind_sentinels(where: RedisAddress, options: dict[str, Any]) -> Redis:
    """Returns a client that asks the Sentinels for the master whenever it connects."""
    parts = urlsplit(where.url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    own: dict[str, Any] = {"db": _database_of(parts.path)}
    if where.password_file is not None:
        own["credential_provider"] = _PasswordOfFile(user, where.password_file)
    elif password:
        own |= {"username": user or None, "password": password}
    tls = _tls_of(where)
    secured: dict[str, Any] = {"ssl": True, **tls} if parts.scheme == _TLS_SCHEME else {}
    # The next Sentinel must not have to wait for one that hangs.
    asking: dict[str, Any] = {
        **options,
        **secured,
        "protocol": 2,
        "retry": Retry(_no_pause(), 0),
        "socket_timeout": options["socket_timeout"] / 2,
        "socket_connect_timeout": options["socket_connect_timeout"] / 2,
    }
    if where.sentinel_password_file is not None:
        asking["password"] = _password_in(where.sentinel_password_file)
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        _addresses(where.sentinels), sentinel_kwargs=asking
    )
    client: Redis = sentinels.master_for(
        where.sentinel_service,
        redis_class=_OfSentinels,
        connection_pool_class=SentinelConnectionPool,
        **options,
        **own,
        **secured,
    )
    return client


class _OfSentinels(Redis):
    """A client that closes its connections to the Sentinels when it is closed."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        manager = getattr(self.connection_pool, "sentinel_manager", None)
        for sentinel in manager.sentinels if manager is not None else ():
            await sentinel.aclose()


def _no_pause() -> ExponentialWithJitterBackoff:
    return ExponentialWithJitterBackoff(base=0.0, cap=0.0)


def _database_of(path: str) -> int:
    text = path.strip("/")
    if text and not text.isdecimal():
        raise InvalidInput("redis_url", f"the database must be a number, not {text!r}")
    return int(text or 0)


def _addresses(texts: Sequence[str]) -> list[tuple[str, int]]:
    found = []
    for text in texts:
        host, _, port = text.rpartition(":") if ":" in text else (text, "", str(SENTINEL_PORT))
        if not host or not port.isdecimal():
            raise InvalidInput("redis_sentinels", f"{text!r} is not host:port")
        found.append((host.strip("[]"), int(port)))
    return found
