from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from catenary_scheduler.settings import SchedulerSettings
from catenary_services.redis.embedded_redis import EmbeddedRedis
from deployed.redis_fixtures import server
from scheduler_harness import Crowd, add_decoder, add_model, settings

__all__ = ["server"]


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    clients = Crowd()
    yield clients
    await clients.close()


@pytest.fixture
def configured(tmp_path: Path, server: EmbeddedRedis) -> Callable[..., SchedulerSettings]:
    add_model(tmp_path / "models")

    def make(**changes: Any) -> SchedulerSettings:
        return settings(tmp_path, server.url, **changes)

    return make


@pytest.fixture
def generating(tmp_path: Path, configured: Callable[..., SchedulerSettings]) -> Any:
    """Makes the settings of a scheduler that serves a model which generates text."""
    add_decoder(tmp_path / "models")

    def make(**changes: Any) -> SchedulerSettings:
        return configured(**{"models": ["llm"], **changes})

    return make
