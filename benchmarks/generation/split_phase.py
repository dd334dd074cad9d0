"""Cost of handing a session over: prompts of 512 tokens on one agent, answers on another.

Processes and model are real. The gap in front of the second token consists of the hand-over and one
step of the other agent; the part beyond a usual step is the hand-over as a client sees it. Agents
report the time from the first token until all caches were there, and the bytes that left.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from itertools import pairwise

import grpc.aio

from benchmarks.generation.generation import DATA, FP32, THREADS, data_dir_of, metric, prompt_of
from catenary_lab.limits import Figure, at_most
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster, free_port

PROMPT_TOKENS = 512
SESSIONS = 4
MEBIBYTE = float(1 << 20)


def placement(key: ModelKey) -> dict[str, object]:
    """Returns a plan document: agent-0 runs prompts, agent-1 generates."""
    blocks = ModelRepository(DATA / "models").block_table(key).blocks
    chains = [
        {"capacity": SESSIONS, "role": role, "hops": [{"agent": agent, "blocks": [0, blocks]}]}
        for role, agent in (("prefill", "agent-0"), ("decode", "agent-1"))
    ]
    return {"models": [{"name": key.name, "chains": chains}]}


async def stream(target: str, number: int, tokens: int) -> list[float]:
    """Returns the times of the tokens of one session, in seconds since its request."""
    prompt = prompt_of(PROMPT_TOKENS, number)
    sampling = generation_pb2.SamplingParameters(max_tokens=tokens, ignore_eos=True)
    request = generation_pb2.GenerateRequest(model=FP32, token_ids=prompt, sampling=sampling)
    loop = asyncio.get_running_loop()
    seconds: list[float] = []
    async with grpc.aio.insecure_channel(target) as channel:
        began = loop.time()
        async for response in generation_pb2_grpc.GenerationStub(channel).Generate(request):
            seconds += [loop.time() - began] * len(response.token_ids)
    if len(seconds) != tokens:
        raise RuntimeError(f"{len(seconds)} tokens instead of {tokens}")
    return seconds


async def measure(quick: bool) -> list[Figure]:
    """Runs a cluster and a few sessions, one after the other, and returns the figures."""
    rounds, tokens = (2, 9) if quick else (8, 33)
    key = ensure_model(DATA / "models", FP32)
    data_dir = data_dir_of("split")
    plan = data_dir / "plan.json"
    plan.write_text(json.dumps(placement(key)))
    ports = [free_port(), free_port()]
    cluster = LocalCluster(
        ClusterOptions(
            agents=2,
            models=(FP32,),
            plan_file=plan,
            grpc_port=0,
            http_port=0,
            data_dir=data_dir,
            extra={"agent": {"threads": THREADS}},
            each_agent=tuple({"metrics_port": port} for port in ports),
        )
    )
    facts = await cluster.start()
    try:
        target = str(facts["grpc"])
        await stream(target, 99, 4)  # opens links, and commits pages of the caches
        before = [_counted(port) for port in ports]
        streams = [await stream(target, number, tokens) for number in range(rounds)]
        after = [_counted(port) for port in ports]
    finally:
        await cluster.stop()
    return figures(streams, _since(before, after))


def _counted(port: int) -> tuple[float, float, float]:
    return (
        metric(port, r"catenary_handover_seconds_sum\b"),
        metric(port, r"catenary_handover_seconds_count\b"),
        metric(port, r"catenary_cache_bytes_total\b"),
    )


def _since(
    before: list[tuple[float, float, float]], after: list[tuple[float, float, float]]
) -> tuple[float, float, float]:
    def grown(field: int) -> float:
        return sum(each[field] for each in after) - sum(each[field] for each in before)

    return grown(0), grown(1), grown(2)


def figures(streams: list[list[float]], counted: tuple[float, float, float]) -> list[Figure]:
    """Returns the figures; on a CPU a step takes some 30 ms, a chunk of 64 tokens 200 ms."""
    seconds, sessions, nbytes = counted
    gaps = [[later - earlier for earlier, later in pairwise(each)] for each in streams]
    step = statistics.median(gap for each in gaps for gap in each[1:])
    second = statistics.median(each[0] for each in gaps)
    handover_ms = 1e3 * seconds / sessions
    return [
        at_most(
            "first token, 512 tokens of prompt",
            1e3 * statistics.median(each[0] for each in streams),
            "ms",
        ),
        at_most("hand-over: first token to all caches there, mean", handover_ms, "ms", 50),
        at_most("second token beyond a usual step", 1e3 * (second - step), "ms"),
        at_most("a usual step", 1e3 * step, "ms"),
        at_most("caches moved per session", nbytes / sessions / MEBIBYTE, "MiB"),
    ]


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return asyncio.run(measure(quick))
