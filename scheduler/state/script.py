"""Lua scripts by their hash, with the source sent again when the server has forgotten it."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Sequence
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError


class Script:
    """One script. EVALSHA costs 40 bytes a call; a restarted server answers NOSCRIPT once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Redis, keys: Sequence[str], arguments: Sequence[str]) -> object:
        """Runs the script; nothing of it is retried if the connection breaks midway."""
        try:
            return await cast(
                Awaitable[object], redis.evalsha(self._sha, len(keys), *keys, *arguments)
            )
        except NoScriptError:
            return await cast(
                Awaitable[object], redis.eval(self._source, len(keys), *keys, *arguments)
            )
