"""Greedy answers over rings of agents are those of `transformers.generate`, token for token.

Fifty chats, float32, over one, two, three and five agents, with ONNX Runtime and with PyTorch; many
at a time, so that batches are composed by chance, and one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import pytest

import catenary
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from cluster_harness import RunningCluster, running_cluster
from language_model import answers_of_transformers, folder_of, install
from small_models.prompts import PROMPTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
TOKENS = 24
AT_A_TIME = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("equality") / "models"
    install(root)
    return root


@pytest.fixture(scope="module")
def chats(models: Path) -> list[list[int]]:
    """Token ids of every chat, by the model's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(models))
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def expected(models: Path, chats: list[list[int]]) -> list[list[int]]:
    """What `transformers.generate` answers, each chat alone."""
    return answers_of_transformers(models, chats, TOKENS)


@contextmanager
def ring(tmp_path: Path, models: Path, agents: int, decoder: str) -> Iterator[RunningCluster]:
    """A cluster whose only chain runs over so many agents, with uneven block ranges."""
    (tmp_path / "models").symlink_to(models)
    cuts = [0, *(round(30 * index / agents) + index % 2 for index in range(1, agents)), 30]
    hops = [
        {"agent": f"agent-{index}", "blocks": [cuts[index], cuts[index + 1]]}
        for index in range(agents)
    ]
    placement = {"models": [{"name": MODEL, "chains": [{"capacity": AT_A_TIME, "hops": hops}]}]}
    config = {"agent": {"threads": 1, "decoder": decoder}}
    with running_cluster(
        tmp_path, models=(MODEL,), placement=placement, config=config, agents=agents
    ) as cluster:
        yield cluster


async def answers_of(
    cluster: RunningCluster, chats: list[list[int]], at_a_time: int
) -> list[list[int]]:
    turns = asyncio.Semaphore(at_a_time)
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        async def one(chat: list[int]) -> list[int]:
            sampling = generation_pb2.SamplingParameters(max_tokens=TOKENS)
            request = generation_pb2.GenerateRequest(model=MODEL, token_ids=chat, sampling=sampling)
            async with turns:
                return [
                    token
                    async for response in stub.Generate(request, timeout=300)
                    for token in response.token_ids
                ]

        return list(await asyncio.gather(*(one(chat) for chat in chats)))


@pytest.mark.parametrize("decoder", ["onnx", "torch"])
@pytest.mark.parametrize("agents", [1, 2, 3, 5])
async def test_answers_over_a_ring_equal_transformers(
    tmp_path: Path,
    models: Path,
    chats: list[list[int]],
    expected: list[list[int]],
    agents: int,
    decoder: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ring(tmp_path, models, agents, decoder) as cluster:
        started = time.monotonic()
        together = await answers_of(cluster, chats, 2 * AT_A_TIME)
        alone = await answers_of(cluster, chats[:5], 1)
        took_s = time.monotonic() - started
        booked = await still_booked(cluster)
    equal = sum(got == wanted for got, wanted in zip(together, expected, strict=True))
    with capsys.disabled():
        tokens = sum(len(answer) for answer in together)
        print(
            f"\n{decoder} over {agents} agents: {equal} of {len(chats)} answers equal,"
            f" {tokens} tokens, {took_s:.1f} s"
        )
    assert together == expected
    assert alone == expected[:5]
    assert booked == 0


async def still_booked(cluster: RunningCluster) -> int:
    """Returns how many reservations are left once everything is answered."""
    async with catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin) as client:
        for _ in range(50):
            status = await client.status()
            if status.live_reservations == 0:
                break
            await asyncio.sleep(0.1)
    return status.live_reservations
