"""Some agents run prompts, others generate: answers are still those of `transformers.generate`.

Real processes, the real model, caches over the peer transport; by the planner's own division of the
agents, over rings that are cut differently, and while agents of either side are killed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import psutil
import pytest

import catenary
from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from cluster_harness import RunningCluster, running_cluster
from language_model import answers_of_transformers, folder_of, install
from small_models.prompts import PROMPTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
CHATS = 12
TOKENS = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("split") / "models"
    install(root)
    return root


@pytest.fixture(scope="module")
def chats(models: Path) -> list[list[int]]:
    """Token ids of the longest chats: their prompts take several chunks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(models))
    every = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS
    ]
    return sorted(every, key=len)[-CHATS:]


@pytest.fixture(scope="module")
def expected(models: Path, chats: list[list[int]]) -> list[list[int]]:
    """What `transformers.generate` answers, each chat alone."""
    return answers_of_transformers(models, chats, TOKENS)


def ring(role: str, capacity: int, agents: list[int], *cuts: int) -> dict[str, object]:
    hops = [
        {"agent": f"agent-{agent}", "blocks": [cuts[at], cuts[at + 1]]}
        for at, agent in enumerate(agents)
    ]
    return {"capacity": capacity, "role": role, "hops": hops}


async def answers_of(cluster: RunningCluster, chats: list[list[int]]) -> list[list[int]]:
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        async def one(chat: list[int]) -> list[int]:
            sampling = generation_pb2.SamplingParameters(max_tokens=TOKENS)
            request = generation_pb2.GenerateRequest(model=MODEL, token_ids=chat, sampling=sampling)
            return [
                token
                async for response in stub.Generate(request, timeout=300)
                for token in response.token_ids
            ]

        return list(await asyncio.gather(*(one(chat) for chat in chats)))


async def status_of(cluster: RunningCluster) -> admin_pb2.GetStatusResponse:
    async with grpc.aio.insecure_channel(cluster.admin) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        return await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10)


async def everything_is_free(cluster: RunningCluster) -> None:
    async with asyncio.timeout(10):
        while (await status_of(cluster)).live_reservations:
            await asyncio.sleep(0.05)


async def test_one_agent_runs_the_prompts_of_the_other(
    tmp_path: Path, models: Path, chats: list[list[int]], expected: list[list[int]]
) -> None:
    (tmp_path / "models").symlink_to(models)
    config = {"agent": {"threads": 1}, "scheduler": {"split_prefill_agents": 1}}
    with running_cluster(tmp_path, models=(MODEL,), config=config, agents=2) as cluster:
        chains = [chain for m in (await status_of(cluster)).models for chain in m.chains]
        assert sorted(chain.role for chain in chains) == ["decode", "prefill"]
        with catenary.Client(cluster.grpc) as client:
            assert client.chat(MODEL, "What is the capital of France?", max_tokens=8).text
        assert await answers_of(cluster, chats) == expected
        await everything_is_free(cluster)


async def test_rings_that_are_cut_differently_give_the_same_answers(
    tmp_path: Path, models: Path, chats: list[list[int]], expected: list[list[int]]
) -> None:
    (tmp_path / "models").symlink_to(models)
    chains = [ring("prefill", 4, [0, 1], 0, 17, 30), ring("decode", 8, [2, 3, 4], 0, 9, 18, 30)]
    placement = {"models": [{"name": MODEL, "chains": chains}]}
    config = {"agent": {"threads": 1}}
    with running_cluster(
        tmp_path, models=(MODEL,), placement=placement, config=config, agents=5
    ) as cluster:
        assert await answers_of(cluster, chats) == expected
        await everything_is_free(cluster)


@pytest.mark.parametrize("victim", ["agent-0", "agent-2"])
async def test_a_killed_agent_of_either_side_costs_no_token(
    tmp_path: Path, models: Path, chats: list[list[int]], expected: list[list[int]], victim: str
) -> None:
    (tmp_path / "models").symlink_to(models)
    chains = [
        ring("prefill", 4, [0], 0, 30),
        ring("prefill", 4, [1], 0, 30),
        ring("decode", 8, [2], 0, 30),
        ring("decode", 8, [3], 0, 30),
    ]
    placement = {"models": [{"name": MODEL, "chains": chains}]}
    config = {"agent": {"threads": 1}}
    with running_cluster(
        tmp_path, models=(MODEL,), placement=placement, config=config, agents=4
    ) as cluster:
        asked = asyncio.create_task(answers_of(cluster, chats))
        async with asyncio.timeout(60):
            while not any(
                chain.sessions and victim in [hop.agent_id for hop in chain.hops]
                for model in (await status_of(cluster)).models
                for chain in model.chains
            ):
                await asyncio.sleep(0.02)
        process_of(cluster, victim).kill()
        assert await asked == expected
        await everything_is_free(cluster)


def process_of(cluster: RunningCluster, agent: str) -> psutil.Process:
    for child in psutil.Process(cluster.process.pid).children(recursive=True):
        if agent in " ".join(child.cmdline()):
            return child
    raise AssertionError(f"no process of {agent}")
