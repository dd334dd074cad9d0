"""Lua scripts called by their hash; the source is sent again when the server has forgotten it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from typing import Any, cast

from hiredis import pack_command
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeout


class RedisScript:
    """One Lua script. EVALSHA costs 40 bytes a call; a restarted server answers NOSCRIPT once.

    Attributes:
        source: The script.
        sha: Its hash, by which the server knows it.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def run(
        self, redis: Redis, keys: Sequence[str], arguments: Sequence[str | bytes]
    ) -> object:
        """Runs the script; it is not retried if the connection breaks midway."""
        try:
            answer = await cast(
                Awaitable[object], redis.evalsha(self.sha, len(keys), *keys, *arguments)
            )
        except NoScriptError:
            answer = await cast(
                Awaitable[object], redis.eval(self.source, len(keys), *keys, *arguments)
            )
        pass_cancellation()
        return answer


class ScriptConnection:
    """A connection of its own for a script that runs every few milliseconds.

    It halves the CPU time of a call: a client takes a connection from its pool for each command,
    and starts a task to send it, because it limits the time of sending and of receiving apart. Here
    hiredis packs the command, in a tenth of the time.
    """

    def __init__(self, redis: Redis) -> None:
        """Opens no connection."""
        self._pool: Any = redis.connection_pool
        self._turn = asyncio.Lock()  # answers come in the order of the calls
        self._connection: Any = None  # redis-py has no public name for the type of all kinds
        self._limit_s: float | None = None
        """Longest time from sending to the answer, in seconds: the client's for one answer."""

    async def run(
        self, script: RedisScript, keys: Sequence[str], arguments: Sequence[str | bytes]
    ) -> object:
        """Runs a script, which must be one that may run twice.

        A second attempt, on a new connection, follows a broken connection or a late answer.
        """
        async with self._turn:
            try:
                return await self._attempt(script, keys, arguments)
            except (ConnectionLost, RedisTimeout, OSError):
                return await self._attempt(script, keys, arguments)

    async def _attempt(
        self, script: RedisScript, keys: Sequence[str], arguments: Sequence[str | bytes]
    ) -> object:
        connection = await self._connected()
        rest: tuple[Any, ...] = (len(keys), *keys, *arguments)
        try:
            # Whatever is raised in here, redis-py closes a connection with an unread answer.
            async with asyncio.timeout(self._limit_s):
                await connection.send_packed_command(pack_command(("EVALSHA", script.sha, *rest)))
                try:
                    return await connection.read_response()
                except NoScriptError:
                    await connection.send_packed_command(
                        pack_command(("EVAL", script.source, *rest))
                    )
                    return await connection.read_response()
        except TimeoutError:
            raise RedisTimeout(f"no answer within {self._limit_s} s") from None

    async def _connected(self) -> Any:
        """Returns the connection, open. Only connecting is limited by redis-py's own time-outs."""
        connection = self._connection
        if connection is None:
            connection = self._connection = await self._pool.get_connection()
            self._limit_s = connection.socket_timeout
        elif connection.is_connected:
            return connection
        else:
            connection.socket_timeout = self._limit_s
            await connection.connect()
        connection.socket_timeout = None
        return connection


def pass_cancellation() -> None:
    """Raises the `CancelledError` that redis-py lost, if one was lost.

    redis-py sends with `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that comes
    in the same turn of the loop as its result. A task in a loop of Redis calls would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
