"""The scheduler hears how prompts begin, and clients how much of them was not computed."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import grpc
import pytest

from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS, prefix_hashes
from generation_harness import Session, TextStage, text_stage
from small_models.tiny_tokenizer import END, tokens_of

BLOCK = PREFIX_BLOCK_TOKENS
PROMPT = [1 + at % 5 for at in range(2 * BLOCK + 7)]
ANSWER = "Hello! " * 10


def reusing(tokens: int):
    """An agent that had cached so much of the prompt."""

    async def script(session: Session) -> None:
        first, *others = tokens_of(ANSWER)
        await session.send(first, cached_tokens=tokens)
        for token in others:
            await session.send(token, cached_tokens=1)
        await session.send(END, "stop")

    return script


async def answer_of(stage: TextStage, prompt: list[int]) -> generation_pb2.GenerateResponse:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(stage.grpc, options=options) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        asked = generation_pb2.GenerateRequest(model="tiny", token_ids=prompt)
        return [response async for response in stub.Generate(asked, timeout=10)][-1]


async def test_numbers_of_blocks_travel_instead_of_tokens(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage:
        stage.agent.script = reusing(BLOCK)
        await answer_of(stage, PROMPT)
        submit = await stage.scheduler.hear("submit_session")
        assert list(submit.prefix_hashes) == prefix_hashes(PROMPT)
        finished = await stage.scheduler.hear("finished")
        whole = [*PROMPT, *tokens_of(ANSWER), END]
        assert len(whole) >= 3 * BLOCK
        assert list(finished.prefix_hashes) == prefix_hashes(whole)[2:]
        assert finished.progress.cached_tokens == BLOCK


async def test_a_prompt_of_less_than_a_block_has_no_number(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage:
        stage.agent.script = reusing(0)
        await answer_of(stage, PROMPT[: BLOCK - 1])
        assert not (await stage.scheduler.hear("submit_session")).prefix_hashes


@pytest.mark.parametrize(("said", "counted"), [(0, 0), (BLOCK, BLOCK), (1 << 20, len(PROMPT) - 1)])
async def test_usage_says_what_was_cached_and_believes_no_more_than_can_be(
    tmp_path: Path, said: int, counted: int
) -> None:
    async with text_stage(tmp_path) as stage:
        stage.agent.script = reusing(said)
        usage = (await answer_of(stage, PROMPT)).usage
        assert (usage.prompt_tokens, usage.cached_tokens) == (len(PROMPT), counted)


async def test_every_http_door_says_it_by_its_own_name(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, aiohttp.ClientSession(stage.http) as client:
        stage.agent.script = reusing(BLOCK)
        body = {"model": "tiny", "prompt": PROMPT}
        async with client.post("/v1/completions", json=body) as response:
            usage = (await response.json())["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": BLOCK}
        assert usage["prompt_tokens"] == len(PROMPT)
        body = {"model": "tiny", "prompt": PROMPT, "n": 2}
        async with client.post("/v1/completions", json=body) as response:
            usage = (await response.json())["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": BLOCK}, "a prompt counts once"
        body = {"model": "tiny", "input": "ab" * 2 * BLOCK}
        async with client.post("/v1/responses", json=body) as response:
            usage = (await response.json())["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == BLOCK
        said = [{"role": "user", "content": "ab" * 2 * BLOCK}]
        body = {"model": "tiny", "max_tokens": 200, "messages": said}
        async with client.post("/v1/messages", json=body) as response:
            usage = (await response.json())["usage"]
        assert usage["cache_read_input_tokens"] == BLOCK
        assert usage["input_tokens"] > 0
