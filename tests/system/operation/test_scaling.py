"""`catenaryd up --max-agents`: load brings agents and takes them away again, and no request is lost.

The agents are emulated, or have an engine of tests: they take the time a device would and make up
tokens, of which each is a function of its position. So an answer is whole if it is as long as was
asked for, and right if it is that of any other answer to the same prompt, whoever gave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from catenary_services.domain.latency import TokenObjectives
from catenary_services.models.model_repository import ModelRepository
from cluster_harness import RunningCluster, running_cluster
from engines.beside_ring import engines_of
from engines.engine_models import engine_model
from engines.fake_engine import fake_python
from language_model import KEY, MODEL, install

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

MOST = 3
TOKENS = 24
PROMPT = "Why is the sky blue?"
TIMES = {
    MODEL: {
        "prefill_ns": 300_000,
        "prefill_token_ns": 10_000,
        "decode_ns": 1_000_000,
        "decode_session_ns": 100_000,
    }
}
"""Per block, of thirty: a step of b sessions takes 30 + 3 b ms, so one agent is enough for some five
answers per second within the objective of 60 ms per token."""
OBJECTIVES = TokenObjectives(first_token_ns=1_500_000_000, per_token_ns=60_000_000)
QUIET_PER_S, BUSY_PER_S = 1.0, 9.0
SCHEDULER = {
    "chain_agents": 1,
    "scale_down_window_s": 6.0,
    "scale_cold_start_s": 8.0,
    "expected_prompt_tokens": 40.0,
    "expected_output_tokens": float(TOKENS),
}


@dataclass
class Seen:
    """What clients and an operator saw."""

    answers: list[tuple[int, ...]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    advice: list[admin_pb2.ScalingAdvice] = field(default_factory=list)

    @property
    def agents(self) -> list[int]:
        """How many there were, over time."""
        return [each.agents_now for each in self.advice]


def emulated_agents(folder: Path) -> dict[str, Any]:
    """Installs the model for emulated agents, and returns their settings."""
    install(folder / "models")
    profile = folder / "times.json"
    profile.write_text(json.dumps(TIMES))
    return {"device": "emulated:any", "emulated_profile": str(profile)}


def engine_agents(folder: Path) -> dict[str, Any]:
    """Installs a model that engines alone serve, five or six answers per second each."""
    engine_model(folder / "models", MODEL, arguments=("fake.token_s=0.03",), max_batch=4)
    return {"decoder": "llama_server", "engine_python": str(fake_python(folder))}


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningCluster]:
    agent = getattr(request, "param", emulated_agents)(tmp_path)
    repository = ModelRepository(tmp_path / "models")
    repository.write_manifest(replace(repository.manifest(KEY), objectives=OBJECTIVES))
    device = agent.pop("device", "cpu")
    config = {"agent": agent, "scheduler": SCHEDULER}
    with running_cluster(
        tmp_path, models=(MODEL,), agents=1, max_agents=MOST, device=device, config=config
    ) as running:
        yield running


@pytest.mark.parametrize("cluster", [emulated_agents, engine_agents], indirect=True)
async def test_agents_follow_the_load_and_no_request_is_lost(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Seen()
    assert cluster.facts["agents"] == ["agent-0"]
    processes = len(psutil.Process(cluster.process.pid).children())
    engines = len(engines_of(psutil.Process(cluster.process.pid)))
    async with watched(cluster, seen), grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        await asked(stub, seen, QUIET_PER_S, 8.0)
        assert max(seen.agents) == 1
        before = len(seen.answers)
        # Loaded until the agents are there, and a while longer: they get their share of it.
        busy = asyncio.create_task(asked(stub, seen, BUSY_PER_S, 25.0))
        await until(lambda: bool(seen.agents) and seen.agents[-1] >= 2, 60.0, "agents came")
        await busy
        most = max(seen.agents)
        assert 2 <= most <= MOST
        await asked(stub, seen, QUIET_PER_S, 30.0)
        await until(lambda: seen.agents[-1] == 1 and not seen.advice[-1].retiring, 60.0, "went")
        async with channel_of(cluster) as admin:
            status = await admin_pb2_grpc.AdminStub(admin).GetStatus(
                admin_pb2.GetStatusRequest(), timeout=5
            )
    with capsys.disabled():
        model = seen.advice[-1].models[0]
        print(
            f"\n1 -> {most} -> {seen.agents[-1]} agents, {len(seen.answers)} answers"
            f" ({before} before the step), reason {model.reason!r}"
        )
    assert seen.errors == []
    assert {len(answer) for answer in seen.answers} == {TOKENS}
    assert len(set(seen.answers)) == 1  # whoever answers, the tokens are the same
    assert status.sessions_in_flight == 0
    assert [agent.state for agent in status.agents if agent.state != "lost"] == ["ready"]
    # The processes of agents that went are gone, and were not started again.
    children = psutil.Process(cluster.process.pid).children()
    assert len(children) == processes
    assert len(engines_of(psutil.Process(cluster.process.pid))) == engines


async def test_a_scheduler_killed_while_agents_come_and_go_loses_no_request(
    cluster: RunningCluster,
) -> None:
    seen = Seen()
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        async with watched(cluster, seen):
            busy = asyncio.create_task(asked(stub, seen, BUSY_PER_S, 30.0))
            await until(lambda: bool(seen.agents) and seen.agents[-1] >= 2, 60.0, "agents came")
        cluster.kill("scheduler")
        await busy
        after = Seen()
        async with watched(cluster, after):  # the stream to the one before is broken
            await until(lambda: bool(after.agents) and after.agents[-1] >= 2, 30.0, "a new leader")
            await asked(stub, seen, QUIET_PER_S, 10.0)
            await until(
                lambda: after.agents[-1] == 1 and not after.advice[-1].retiring, 90.0, "went"
            )
    assert seen.errors == []
    assert {len(answer) for answer in seen.answers} == {TOKENS}
    assert len(set(seen.answers)) == 1


async def asked(
    stub: generation_pb2_grpc.GenerationStub, seen: Seen, per_s: float, seconds: float
) -> None:
    """Asks at random moments for so long; returns when everything is answered."""
    source, loop = random.Random(7), asyncio.get_running_loop()
    end = loop.time() + seconds
    open_: set[asyncio.Task[None]] = set()
    while (pause := source.expovariate(per_s)) + loop.time() < end:
        await asyncio.sleep(pause)
        open_.add(asyncio.create_task(one(stub, seen)))
    await asyncio.gather(*open_)


async def one(stub: generation_pb2_grpc.GenerationStub, seen: Seen) -> None:
    tokens: list[int] = []
    request = generation_pb2.GenerateRequest(
        model=MODEL,
        messages=[generation_pb2.ChatMessage(role="user", content=PROMPT)],
        sampling=generation_pb2.SamplingParameters(max_tokens=TOKENS, ignore_eos=True),
    )
    try:
        async for response in stub.Generate(request, timeout=90):
            tokens += response.token_ids
        seen.answers.append(tuple(tokens))
    except grpc.aio.AioRpcError as error:
        seen.errors.append(f"{error.code().name}: {error.details()}")


def channel_of(cluster: RunningCluster) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(cluster.admin)


@asynccontextmanager
async def watched(cluster: RunningCluster, seen: Seen) -> AsyncIterator[None]:
    async def watch() -> None:
        async with channel_of(cluster) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            while True:  # until there is a leader that advises
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for advice in stub.WatchScaling(admin_pb2.WatchScalingRequest()):
                        seen.advice.append(advice)
                await asyncio.sleep(0.2)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Any, timeout_s: float, what: str) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.1)
