"""A gateway whose tiny model says what a test wants, and the prompts that it was given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai

from generation_harness import Session, TextStage, generating, text_stage
from small_models.tiny_tokenizer import MORE, text_model

SESSION_TOKENS = 8192
"""Tools take room, as each byte of the prompt is a token."""


@asynccontextmanager
async def model_that_says(
    tmp_path: Path, text: str, *, finish: str = "stop", **files: Any
) -> AsyncIterator[tuple[TextStage, openai.AsyncOpenAI]]:
    """Serves a model that answers everything with `text`."""

    async def script(session: Session) -> None:
        await session.say(text, finish=finish)

    made, models = partial(text_model, **files), [generating(session_tokens=SESSION_TOKENS)]
    async with text_stage(tmp_path, files=made, models=models) as stage:
        stage.agent.script = script
        url = f"{stage.http}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            yield stage, client


def prompt_of(stage: TextStage) -> str:
    """Returns the text of the last prompt; special tokens are bars."""
    tokens = stage.agent.frames[-1].session_rows[0].opening.token_ids
    return bytes(token - 3 if 3 <= token < MORE else ord("|") for token in tokens).decode()
