from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from gateway_harness import Stage, stage


@pytest.fixture(scope="session", params=["uvloop", "asyncio"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Processes run on uvloop, whose transports are not asyncio's; users of harnesses may not."""
    return (
        uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()
    )


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path, bad_requests_per_s=1e6) as started:
        yield started
