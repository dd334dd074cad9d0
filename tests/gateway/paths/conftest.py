"""A gateway with models for every path, started for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from generation_harness import TextStage
from shared_helpers.encoder_agent import all_paths_stage


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[TextStage]:
    async with all_paths_stage(tmp_path) as started:
        yield started


@pytest.fixture
async def client(running: TextStage) -> AsyncIterator[openai.AsyncOpenAI]:
    made = openai.AsyncOpenAI(
        base_url=f"{running.http}/v1", api_key="any", max_retries=0, timeout=30.0
    )
    async with made as opened:
        yield opened
