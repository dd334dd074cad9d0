from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_harness import Stage, stage


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path) as started:
        yield started
