"""A gateway with models for every path, started for each file of tests.

Each of its models takes a process for its texts; to start them takes longer than most tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from generation_harness import TextStage, answering
from shared_helpers.encoder_agent import EncoderAgent, all_paths_stage

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has the tests of a file here share an event loop, as they share a gateway."""
    for item in items:
        if item.path.parent == _HERE and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TextStage]:
    async with all_paths_stage(tmp_path_factory.mktemp("paths")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def running(shared: TextStage) -> AsyncIterator[TextStage]:
    """The gateway, of which nobody has asked anything yet."""
    await shared.start_over()
    assert isinstance(shared.agent, EncoderAgent)
    shared.agent.script, shared.agent.rows = answering, 0
    yield shared


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: TextStage) -> AsyncIterator[openai.AsyncOpenAI]:
    made = openai.AsyncOpenAI(
        base_url=f"{running.http}/v1", api_key="any", max_retries=0, timeout=30.0
    )
    async with made as opened:
        yield opened
