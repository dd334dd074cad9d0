"""Several scored answers of a running cluster, by the unmodified `openai` client."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import openai


@dataclass
class ScoredChoice:
    """What a client saw of one choice of a stream."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    finish_reason: str = ""


async def scored_choices(http: str, prompt: str, **facts: Any) -> list[ScoredChoice]:
    """Streams a chat with log probabilities; returns its choices in the order of their indices.

    Raises:
        openai.APIError: The answer is not complete.
    """
    choices: dict[int, ScoredChoice] = {}
    said = [{"role": "user", "content": prompt}]
    known = {"logprobs": True, "top_logprobs": 3, "temperature": 0.8, "stream": True}
    async with openai.AsyncOpenAI(
        base_url=f"{http}/v1", api_key="any", max_retries=0, timeout=180
    ) as client:
        async for chunk in await client.chat.completions.create(messages=said, **(known | facts)):
            for each in chunk.choices:
                seen = choices.setdefault(each.index, ScoredChoice())
                seen.text += each.delta.content or ""
                seen.finish_reason = each.finish_reason or seen.finish_reason
                for token in (each.logprobs.content or []) if each.logprobs else []:
                    seen.tokens.append(token.token)
                    seen.logprobs.append(token.logprob)
                    seen.top.append({one.token: one.logprob for one in token.top_logprobs})
                    seen.moments.append(time.monotonic())
    return [choices[index] for index in sorted(choices)]


async def all_scored(http: str, prompts: list[str], **facts: Any) -> list[list[ScoredChoice]]:
    """Returns `scored_choices` of every prompt, all asked at once."""
    return list(await asyncio.gather(*(scored_choices(http, each, **facts) for each in prompts)))


def assert_equal(got: list[list[ScoredChoice]], expected: list[list[ScoredChoice]]) -> None:
    """Fails unless the same tokens came with the same log probabilities, each once."""
    for mine, its in zip(got, expected, strict=True):
        for one, other in zip(mine, its, strict=True):
            assert (one.tokens, one.text) == (other.tokens, other.text)
            assert one.finish_reason == other.finish_reason
            assert max(map(_apart, one.logprobs, other.logprobs), default=0.0) < 1e-4
            for left, right in zip(one.top, other.top, strict=True):
                # Of equally likely tokens the last ones may differ.
                assert max(map(_apart, sorted(left.values()), sorted(right.values()))) < 1e-4


def _apart(one: float, other: float) -> float:
    return abs(one - other)
