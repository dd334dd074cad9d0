"""kill -9 in the middle of answers: streams go on without a gap, greedy tokens stay the same.

Two chains serve the model: one over agents 0, 1 and 2, one on agent 3 alone. Sessions are running on
both when a process dies; each of them must end with exactly the tokens of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

import catenary
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from cluster_harness import RunningCluster, running_cluster
from language_model import install
from prompts import PROMPTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

MODEL = "smollm2-135m"
TOKENS = 48
SESSIONS = 8
PLACEMENT = {
    "models": [{
        "name": MODEL,
        "chains": [
            {"capacity": 6, "hops": [
                {"agent": "agent-0", "blocks": [0, 10]},
                {"agent": "agent-1", "blocks": [10, 20]},
                {"agent": "agent-2", "blocks": [20, 30]},
            ]},
            {"capacity": 10, "hops": [{"agent": "agent-3", "blocks": [0, 30]}]},
        ],
    }]
}  # fmt: skip


@dataclass
class Answer:
    """What a client saw of one session."""

    tokens: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    finish_reason: str = ""
    completion_tokens: int = 0
    error: str = ""

    @property
    def longest_pause_s(self) -> float:
        return max(
            (b - a for a, b in zip(self.moments, self.moments[1:], strict=False)), default=0.0
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults") / "models"
    install(root)
    return root


@pytest.fixture
def cluster(tmp_path: Path, models: Path) -> Iterator[RunningCluster]:
    (tmp_path / "models").symlink_to(models)
    with running_cluster(
        tmp_path, models=(MODEL,), placement=PLACEMENT, agents=4, config={"agent": {"threads": 1}}
    ) as running:
        yield running


async def answer(stub: generation_pb2_grpc.GenerationStub, prompt: str) -> Answer:
    seen = Answer()
    request = generation_pb2.GenerateRequest(
        model=MODEL,
        messages=[generation_pb2.ChatMessage(role="user", content=prompt)],
        sampling=generation_pb2.SamplingParameters(max_tokens=TOKENS, ignore_eos=True),
    )
    try:
        async for response in stub.Generate(request, timeout=120):
            seen.tokens += response.token_ids
            seen.moments += [time.monotonic()] * len(response.token_ids)
            seen.finish_reason = response.finish_reason
            seen.completion_tokens = response.usage.completion_tokens
    except grpc.aio.AioRpcError as error:
        seen.error = f"{error.code().name}: {error.details()}"
    return seen


@pytest.mark.parametrize("victim", ["agent-0", "agent-1", "agent-2", "agent-3", "scheduler"])
async def test_a_process_killed_in_the_middle_of_answers_changes_no_token(
    cluster: RunningCluster, victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = PROMPTS[:SESSIONS]
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        undisturbed = await asyncio.gather(*(answer(stub, prompt) for prompt in prompts))
        running = [asyncio.create_task(answer(stub, prompt)) for prompt in prompts]
        await half_of(running, undisturbed)
        cluster.kill(victim)
        answers = await asyncio.gather(*running)
    booked = await still_booked(cluster)
    pauses = sorted(each.longest_pause_s for each in answers)
    equal = sum(
        got.tokens == wanted.tokens for got, wanted in zip(answers, undisturbed, strict=True)
    )
    with capsys.disabled():
        print(
            f"\nkill -9 {victim}: {equal} of {SESSIONS} answers unchanged,"
            f" errors {[each.error for each in answers if each.error]},"
            f" longest pause {pauses[-1]:.2f} s, median {pauses[len(pauses) // 2]:.2f} s"
        )
    assert [each.error for each in answers if each.error] == []
    assert [each.tokens for each in answers] == [each.tokens for each in undisturbed]
    assert {each.finish_reason for each in answers} == {"length"}
    assert {each.completion_tokens for each in answers} == {TOKENS}
    assert booked == 0


async def half_of(running: list[asyncio.Task[Answer]], undisturbed: list[Answer]) -> None:
    """Waits about half as long as the undisturbed answers took."""
    took = max(each.moments[-1] for each in undisturbed) - min(
        each.moments[0] for each in undisturbed
    )
    await asyncio.wait(running, timeout=took / 2)


async def still_booked(cluster: RunningCluster) -> int:
    """Returns how many reservations are left once everything is answered."""
    async with catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin) as client:
        for _ in range(100):
            status = await client.status()
            if status.live_reservations == 0:
                break
            await asyncio.sleep(0.1)
    return status.live_reservations
