from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from tests.support.agent_harness import open_net
from tests.support.ring_harness import RingNet


@pytest.fixture
async def rings():
    """Agents of one host; fails the test if it left tasks behind."""
    before = asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="cat-") as folder:  # short: it holds Unix sockets
        async with open_net(Path(folder)) as net:
            opened = RingNet(net)
            try:
                yield opened
            finally:
                await opened.close()
    await asyncio.sleep(0)
    leaked = {t for t in asyncio.all_tasks() - before - {asyncio.current_task()} if not t.done()}
    assert not leaked, leaked
