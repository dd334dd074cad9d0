"""More sessions than memory holds at full length, with real processes and the real model.

Long answers outgrow the memory of a chain: some sessions have to wait and go on later. Everybody is
answered, word for word as alone, and agents never take more memory than they were given.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from benchmarks.generation.cache_growth import cache_memory_bytes, preempted_sessions
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import free_port
from cluster_harness import RunningCluster, running_cluster
from language_model import install

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
SESSIONS, SESSION_TOKENS, CACHE_TOKENS = 8, 512, 512
PROMPT_TOKENS, ANSWER_TOKENS = 32, 96
CUT = 14
"""Blocks on the first agent, of 30."""
CHATS = [
    [1000 + (number * 7919 + at * 31) % 20_000 for at in range(PROMPT_TOKENS)]
    for number in range(SESSIONS)
]


async def answer(stub: generation_pb2_grpc.GenerationStub, chat: list[int]) -> list[int]:
    sampling = generation_pb2.SamplingParameters(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    request = generation_pb2.GenerateRequest(model=MODEL, token_ids=chat, sampling=sampling)
    return [
        token
        async for response in stub.Generate(request, timeout=400)
        for token in response.token_ids
    ]


async def most_taken(cluster: RunningCluster, agent: str, over: asyncio.Event) -> int:
    """Returns the most memory an agent's caches took until it was over."""
    most = 0
    while not over.is_set():
        most = max(most, await asyncio.to_thread(cache_memory_bytes, cluster.facts["pids"][agent]))
        await asyncio.sleep(0.1)
    return most


@pytest.mark.parametrize("decoder", ["onnx", "torch"])
async def test_long_answers_outgrow_the_memory_and_all_are_as_undisturbed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], decoder: str
) -> None:
    key = install(tmp_path / "models")
    table = ModelRepository(tmp_path / "models").decoder_table(key)
    hops = [
        {"agent": "agent-0", "blocks": [0, CUT]},
        {"agent": "agent-1", "blocks": [CUT, table.blocks]},
    ]
    chain = {"capacity": SESSIONS, "cache_tokens": CACHE_TOKENS, "hops": hops}
    placement = {"models": [{"name": MODEL, "session_tokens": SESSION_TOKENS, "chains": [chain]}]}
    port = free_port()
    config = {"agent": {"threads": 1, "decoder": decoder}, "scheduler": {"metrics_port": port}}
    assert SESSIONS * (PROMPT_TOKENS + ANSWER_TOKENS) > CACHE_TOKENS
    with running_cluster(
        tmp_path, models=(MODEL,), placement=placement, config=config, agents=2
    ) as cluster:
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            over = asyncio.Event()
            watching = [
                asyncio.create_task(most_taken(cluster, agent, over))
                for agent in ("agent-0", "agent-1")
            ]
            together = await asyncio.gather(*(answer(stub, chat) for chat in CHATS))
            over.set()
            taken = await asyncio.gather(*watching)
            alone = [await answer(stub, chat) for chat in CHATS[-3:]]
            waited = await asyncio.to_thread(preempted_sessions, port)
    with capsys.disabled():
        mebibytes = ", ".join(f"{each / 2**20:.1f}" for each in taken)
        print(f"\n{decoder}: {waited:.0f} preempted; caches took {mebibytes} MiB at most")
    assert [len(each) for each in together] == [ANSWER_TOKENS] * SESSIONS
    assert together[-3:] == alone
    assert waited > 0
    if decoder == "torch":
        return  # its pool has the rows of `CACHE_TOKENS`, and no others
    for most, blocks in zip(taken, (CUT, table.blocks - CUT), strict=True):
        step = SESSIONS * blocks * table.slot_bytes(16)
        assert 0 < most <= blocks * table.slot_bytes(CACHE_TOKENS) + step
