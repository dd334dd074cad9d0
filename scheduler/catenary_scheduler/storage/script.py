"""Lua scripts called by their hash; the source is sent again when the server has forgotten it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError


class RedisScript:
    """One Lua script. EVALSHA costs 40 bytes a call; a restarted server answers NOSCRIPT once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def run(
        self, redis: Redis, keys: Sequence[str], arguments: Sequence[str | bytes]
    ) -> object:
        """Runs the script; it is not retried if the connection breaks midway."""
        try:
            answer = await cast(
                Awaitable[object], redis.evalsha(self._sha, len(keys), *keys, *arguments)
            )
        except NoScriptError:
            answer = await cast(
                Awaitable[object], redis.eval(self._source, len(keys), *keys, *arguments)
            )
        pass_cancellation()
        return answer


def pass_cancellation() -> None:
    """Raises the `CancelledError` that redis-py lost, if one was lost.

    redis-py sends with `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that comes
    in the same turn of the loop as its result. A task in a loop of Redis calls would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
