from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from gateway_harness import Stage, stage


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Processes run on uvloop, whose transports are not asyncio's; some harnesses do not."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path, bad_requests_per_s=1e6) as started:
        yield started
