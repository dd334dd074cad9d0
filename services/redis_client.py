"""A Redis client with the time-outs we want: no call hangs, a restarted server is found again."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff

MAX_CONNECTIONS = 32
"""Of one process; more callers at once is a bug and gets an error instead of a socket."""


def connect(url: str, *, timeout_s: float = 2.0, retries: int = 3) -> Redis:
    """Returns a client for `url` ("redis://", "rediss://" or "unix://"); connects when first used.

    Replies are bytes. Errors are those of redis-py (`redis.exceptions.RedisError`).

    Args:
        url: With password and database number, if any.
        timeout_s: For connecting, and for each reply.
        retries: How often a command is repeated after a broken connection or a time-out; 0 for
            commands that must not run twice.
    """
    client: Redis = Redis.from_url(
        url,
        protocol=3,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        health_check_interval=15,
        max_connections=MAX_CONNECTIONS,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.25), retries),
    )
    return client
