"""Fixtures: an embedded Redis of the test's own, and a client of it. A `conftest.py` imports them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from catenary_services.redis.embedded_redis import EmbeddedRedis
from catenary_services.redis.redis_client import connect


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(tmp_path / "redis")
    await embedded.start()
    yield embedded
    await embedded.stop()


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    client = connect(server.url, timeout_s=1.0, retries=0)
    yield client
    await client.aclose()
