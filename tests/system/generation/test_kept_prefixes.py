"""Conversations begin behind what agents have kept, and every answer is what it was without.

Real processes, the real model, float32. The same conversations, greedy ones and sampled ones, are
held twice: on agents that keep nothing, and on agents that keep beginnings, while these are killed
and sessions move between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil
import pytest

import catenary
from catenary_lab.live.packing.load import Mover
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from cluster_harness import RunningCluster, running_cluster
from language_model import install

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
TOKENS = 40
HEAD = [1000 + at * 7919 % 20_000 for at in range(200)]
"""What all conversations begin with."""
RINGS = {
    "one ring of three": [[(0, 0, 9), (1, 9, 20), (2, 20, 30)]],
    "two rings": [[(0, 0, 17), (1, 17, 30)], [(2, 0, 30)]],
}
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.1, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.1},
)


@dataclass
class Conversation:
    """The text so far, and what was said of each answer."""

    number: int
    text: list[int] = field(default_factory=lambda: list(HEAD))
    answers: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    async def turn(self, stub: generation_pb2_grpc.GenerationStub) -> None:
        """Says something, and takes the answer."""
        turn = len(self.answers)
        self.text += [3000 + (self.number * 31 + turn * 17 + at) % 9000 for at in range(9)]
        sampling = SAMPLINGS[self.number % len(SAMPLINGS)]
        request = generation_pb2.GenerateRequest(
            model=MODEL,
            token_ids=self.text,
            sampling=generation_pb2.SamplingParameters(
                max_tokens=TOKENS, ignore_eos=True, **sampling
            ),
        )
        answer: list[int] = []
        async for response in stub.Generate(request, timeout=200):
            answer += response.token_ids
            if response.finish_reason:
                self.cached.append(response.usage.cached_tokens)
                assert response.usage.prompt_tokens == len(self.text)
        self.text += answer
        self.answers.append(answer)


class World:
    """A cluster, and conversations held there."""

    def __init__(
        self,
        cluster: RunningCluster,
        client: catenary.AsyncClient,
        stub: generation_pb2_grpc.GenerationStub,
    ) -> None:
        self.cluster = cluster
        self.client = client
        self.stub = stub
        self.conversations = [Conversation(number) for number in range(len(SAMPLINGS))]

    async def turns(self) -> None:
        """Holds the next turn of all conversations at a time."""
        await asyncio.gather(*(each.turn(self.stub) for each in self.conversations))

    async def turns_on_the_move(self) -> None:
        """The same while sessions move between rings, where there are two."""
        mover = Mover(self.client, MODEL, wanted=1 << 20, seed=1)
        moving = asyncio.create_task(mover.run(lambda: None))
        try:
            await self.turns()
        finally:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    def kill(self, victim: str) -> None:
        """Sends SIGKILL to an agent, which is started again."""
        for process in psutil.Process(self.cluster.process.pid).children(recursive=True):
            if f" {victim} " in f"{' '.join(process.cmdline())} ":
                process.kill()
                return
        raise AssertionError(f"there is no {victim}")


@asynccontextmanager
async def world(
    tmp_path: Path, models: Path, rings: str, *, prefix_cache: str
) -> AsyncIterator[World]:
    tmp_path.mkdir()
    (tmp_path / "models").symlink_to(models)
    chains = [
        {"capacity": 8, "hops": [{"agent": f"agent-{a}", "blocks": [b, e]} for a, b, e in ring]}
        for ring in RINGS[rings]
    ]
    placement = {"models": [{"name": MODEL, "chains": chains}]}
    config = {
        "agent": {"threads": 1, "prefix_cache": prefix_cache},
        "scheduler": {"packing": "off"},
    }
    with running_cluster(
        tmp_path, models=(MODEL,), placement=placement, config=config, agents=3
    ) as cluster:
        async with (
            catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin) as client,
            grpc.aio.insecure_channel(cluster.grpc) as channel,
        ):
            yield World(cluster, client, generation_pb2_grpc.GenerationStub(channel))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prefixes") / "models"
    install(root)
    return root


@pytest.mark.parametrize("rings", list(RINGS))
async def test_answers_are_the_same_with_and_without_what_was_kept(
    tmp_path: Path, models: Path, rings: str
) -> None:
    async with world(tmp_path / "off", models, rings, prefix_cache="off") as here:
        for _ in range(5):
            await here.turns()
        expected = here.conversations
    async with world(tmp_path / "on", models, rings, prefix_cache="on") as here:
        await here.turns()
        await here.turns()
        for each in here.conversations:
            said = len(HEAD) + 9  # at least: what is said last is kept a moment later
            assert each.cached[1] >= said // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS
        here.kill("agent-1")
        await here.turns()
        await here.turns_on_the_move()
        here.kill("agent-2")
        await here.turns()
        kept = here.conversations
    for one, other in zip(kept, expected, strict=True):
        assert one.answers == other.answers
        assert other.cached == [0] * 5
