"""Prompts of 512 tokens beside four streams on one agent with one thread.

Processes and model are real. A chunk of a prompt is computed in the same step as the next tokens of
the streams, so the length of chunks decides between the gaps in these and the first token of the
prompt (`catenary_agent.generation.loop.step_plan`).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import grpc.aio
import numpy as np

from benchmarks.generation.generation import DATA, FP32, INT4, THREADS, data_dir_of, prompt_of
from catenary_lab.limits import Figure, at_most
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenaryd.demo.models import ensure_model
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster

PROMPT_TOKENS = 512
STREAMS = 4
LONGEST_FIRST_TOKEN_MS = 2_500
LONGEST_GAP_MS = 150


async def tokens_of(
    stub: generation_pb2_grpc.GenerationStub, model: str, prompt: list[int], tokens: int
) -> AsyncIterator[float]:
    """Yields the time of the event loop at each answer with tokens of a session, in seconds.

    Tokens are sampled: greedy answers to arbitrary tokens repeat themselves and are guessed.
    """
    sampling = generation_pb2.SamplingParameters(
        max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=len(prompt)
    )
    request = generation_pb2.GenerateRequest(model=model, token_ids=prompt, sampling=sampling)
    loop = asyncio.get_running_loop()
    async for response in stub.Generate(request):
        if response.token_ids:
            yield loop.time()


@asynccontextmanager
async def streams(
    stub: generation_pb2_grpc.GenerationStub, model: str
) -> AsyncIterator[list[list[float]]]:
    """Runs the streams inside the block; each list grows by the times of a stream's tokens."""
    times: list[list[float]] = [[] for _ in range(STREAMS)]

    async def run(number: int) -> None:
        async for moment in tokens_of(stub, model, prompt_of(32, number), 1_000):
            times[number].append(moment)

    tasks = [asyncio.create_task(run(number)) for number in range(STREAMS)]
    try:
        while min(map(len, times)) < 8:
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done():
                    task.result()
        yield times
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_model(target: str, model: str, rounds: int) -> list[Figure]:
    """Sends prompts beside running streams, one at a time; returns the figures of a model."""
    loop = asyncio.get_running_loop()
    spans: list[tuple[float, float]] = []
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        async with streams(stub, model) as times:
            for number in range(rounds):
                began = loop.time()
                async for moment in tokens_of(
                    stub, model, prompt_of(PROMPT_TOKENS, 90 + number), 1
                ):
                    spans.append((began, moment))
                await asyncio.sleep(0.5)
    gaps = [
        1e3 * (later - earlier)
        for each in times
        for earlier, later in pairwise(each)
        if any(began < later and earlier < ended for began, ended in spans)
    ]
    first_ms = statistics.median(1e3 * (ended - began) for began, ended in spans)
    return [
        at_most(
            f"{model}: first token of {PROMPT_TOKENS} beside {STREAMS} streams",
            first_ms,
            "ms",
            LONGEST_FIRST_TOKEN_MS,
        ),
        at_most(
            f"{model}: p99 between tokens while prompts are read",
            float(np.percentile(gaps, 99)),
            "ms",
            LONGEST_GAP_MS,
        ),
        at_most(f"{model}: median between tokens then", statistics.median(gaps), "ms"),
    ]


async def measure(quick: bool) -> list[Figure]:
    """Runs a cluster of one agent and returns the figures of both precisions."""
    models = (FP32, INT4)
    for model in models:
        ensure_model(DATA / "models", model)
    cluster = LocalCluster(
        ClusterOptions(
            agents=1,
            models=models,
            grpc_port=0,
            http_port=0,
            data_dir=data_dir_of("beside"),
            extra={"agent": {"threads": THREADS}},
        )
    )
    facts = await cluster.start()
    try:
        target = str(facts["grpc"])
        figures: list[Figure] = []
        for model in models:
            figures += await measure_model(target, model, 2 if quick else 8)
    finally:
        await cluster.stop()
    return figures


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return asyncio.run(measure(quick))
