"""The gain by kept beginnings: the first token of a chat whose system prompt was read before.

In every round, a first chat with a head of its own is followed by a second one with the same head
and another question. The first one's time is what the second one's would be without the cache.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks.generation.generation import DATA, FP32, Cluster
from catenary_lab.limits import Figure, at_least
from catenary_protos.catenary.v1 import generation_pb2
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from catenaryd.demo.models import ensure_model

HEAD_TOKENS = 900
QUESTION_TOKENS = 20
ANSWER_TOKENS = 8


def chat(head: int, question: int) -> list[int]:
    """Returns the tokens of a chat: an arbitrary head, and an arbitrary question behind it."""
    tokens = [1000 + (head * 104_729 + at * 7919) % 40_000 for at in range(HEAD_TOKENS)]
    return tokens + [2000 + (question * 31 + at * 17) % 9000 for at in range(QUESTION_TOKENS)]


async def ask(cluster: Cluster, prompt: list[int]) -> tuple[float, int]:
    """Returns the seconds until the first token of an answer, and how much was not computed."""
    sampling = generation_pb2.SamplingParameters(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    started, first_s, cached = time.perf_counter(), 0.0, 0
    async for response in cluster.generate(prompt, sampling):
        first_s = first_s or time.perf_counter() - started
        cached = response.usage.cached_tokens or cached
    return first_s, cached


async def measure(quick: bool) -> list[Figure]:
    """Returns the figures of chains of one agent and of three."""
    ensure_model(DATA / "models", FP32)
    figures: list[Figure] = []
    for agents in (1, 3):
        cluster = Cluster(f"prefixes-{agents}", FP32, agents, keeps_prefixes=True)
        await cluster.start()
        try:
            figures += await _of_size(cluster, agents, rounds=2 if quick else 5)
        finally:
            await cluster.stop()
    return figures


async def _of_size(cluster: Cluster, agents: int, rounds: int) -> list[Figure]:
    await ask(cluster, chat(0, 0)[-QUESTION_TOKENS:])
    firsts, seconds, shares = [], [], []
    whole = HEAD_TOKENS // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS
    for head in range(1, rounds + 1):
        first_s, cached = await ask(cluster, chat(head, 1))
        if cached:
            raise RuntimeError(f"{cached} tokens of a new head were cached")
        firsts.append(first_s)
        second_s, cached = await ask(cluster, chat(head, 2))
        seconds.append(second_s)
        shares.append(100 * cached / whole)
    where = "one agent" if agents == 1 else f"{agents} agents"
    gain = statistics.median(firsts) / statistics.median(seconds)
    return [
        at_least(f"{where}, head of {HEAD_TOKENS} tokens: first token, gain", gain, "x", 5.0),
        at_least(f"{where}, whole blocks of it that were not computed", min(shares), "%", 100.0),
    ]


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return asyncio.run(measure(quick))
