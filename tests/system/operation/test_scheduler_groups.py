"""Two schedulers, two groups, four agents under load; kill -9 of one scheduler.

Its group must be led by the other one soon after the lease is over, and no request may be lost:
neither images, which go to whole batches, nor texts, which go on token by token.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

import catenary
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenaryd.demo.demo_models import preprocess, sample_photographs
from cluster_harness import MODEL, RunningCluster, running_cluster
from fault_cluster import TEXTS, shared_models

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

AGENTS, GROUPS = 4, 2
IMAGES_PER_S, TEXTS_PER_S = 8.0, 2.0
BEFORE_S, AFTER_S = 4.0, 14.0
TOKENS = 48
SLO_MS = 12_000
LEASE_S, GRACE_S = 2.0, 0.5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    shutil.copytree(shared_models(), tmp_path / "models")
    config = {
        "scheduler": {"lease_s": LEASE_S, "takeover_grace_s": GRACE_S},
        "agent": {"threads": 1},
    }
    with running_cluster(
        tmp_path,
        models=(MODEL, TEXTS),
        agents=AGENTS,
        schedulers=2,
        groups=GROUPS,
        config=config,
    ) as running:
        yield running


@dataclass
class Outcome:
    """What became of one request; times in seconds from the start of the load."""

    kind: str
    sent: float
    answered: float = 0.0
    error: str = ""
    right: bool = False


class Load:
    """Open-loop load of both kinds; every request is accounted for."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.client = catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin)
        self._channel = grpc.aio.insecure_channel(cluster.grpc)
        self._texts = generation_pb2_grpc.GenerationStub(self._channel)
        self._image = preprocess(sample_photographs()["coffee"])
        self._expected: tuple[int, list[int]] = (0, [])
        self._start_s = 0.0
        self.outcomes: list[Outcome] = []

    async def prepare(self) -> None:
        self._expected = (await self._label(), await self._tokens())

    async def close(self) -> None:
        await self.client.close()
        await self._channel.close()

    async def run(self, seconds: float) -> None:
        self._start_s = time.monotonic()
        images = [(n / IMAGES_PER_S, "image") for n in range(int(seconds * IMAGES_PER_S))]
        texts = [(n / TEXTS_PER_S, "text") for n in range(int(seconds * TEXTS_PER_S))]
        tasks = []
        for moment, kind in sorted(images + texts):
            await asyncio.sleep(max(0.0, self._start_s + moment - time.monotonic()))
            tasks.append(asyncio.create_task(self._one(kind)))
        await asyncio.gather(*tasks)

    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _one(self, kind: str) -> None:
        outcome = Outcome(kind, self.now_s())
        self.outcomes.append(outcome)
        try:
            if kind == "image":
                outcome.right = await self._label() == self._expected[0]
            else:
                outcome.right = await self._tokens() == self._expected[1]
        except (catenary.CatenaryError, grpc.aio.AioRpcError) as error:
            outcome.error = repr(error)
        outcome.answered = self.now_s()

    async def _label(self) -> int:
        answer = await self.client.infer(
            MODEL, {"image": self._image}, slo_ms=SLO_MS, timeout_s=SLO_MS / 1000 + 5
        )
        return int(np.argmax(next(iter(answer.outputs.values()))[0]))

    async def _tokens(self) -> list[int]:
        request = generation_pb2.GenerateRequest(
            model=TEXTS,
            prompt="w5 w6 w7 w8 w9",
            sampling=generation_pb2.SamplingParameters(max_tokens=TOKENS, ignore_eos=True),
        )
        tokens: list[int] = []
        async for response in self._texts.Generate(request, timeout=60):
            tokens += response.token_ids
        return tokens


async def all_groups_serve(client: catenary.AsyncClient) -> catenary.ClusterStatus:
    deadline_s = time.monotonic() + 90
    while True:
        status = await client.status()
        led = [group for group in status.groups if group.scheduler_id and group.plan_id]
        if len(led) == GROUPS and all(group.agents == AGENTS // GROUPS for group in led):
            return status
        assert time.monotonic() < deadline_s, status
        await asyncio.sleep(0.1)


async def led_again(client: catenary.AsyncClient, group: int, by: str) -> float:
    """Returns how long it takes until another scheduler leads a group."""
    began_s = time.monotonic()
    while True:
        status = await client.status()
        if status.groups[group].scheduler_id == by:
            return time.monotonic() - began_s
        assert time.monotonic() - began_s < 20.0, status.groups
        await asyncio.sleep(0.02)


async def test_a_killed_scheduler_s_group_goes_on_at_the_other_and_no_request_is_lost(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(cluster)
    status = await all_groups_serve(load.client)
    assert {a.agent_id: a.group for a in status.agents} == {
        f"agent-{n}": n % GROUPS for n in range(AGENTS)
    }
    leaders = {group.group: group.scheduler_id for group in status.groups}
    assert sorted(leaders.values()) == ["scheduler-0", "scheduler-1"]
    await load.prepare()
    running = asyncio.create_task(load.run(BEFORE_S + AFTER_S))
    await asyncio.sleep(BEFORE_S)
    group = next(g for g, name in leaders.items() if name == "scheduler-1")
    cluster.kill("scheduler-1")
    taken_s = await led_again(load.client, group, "scheduler-0")
    await running
    after = await all_groups_serve(load.client)
    await load.close()

    outcomes = load.outcomes
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    longest = max(outcome.answered - outcome.sent for outcome in outcomes)
    kinds = Counter(outcome.kind for outcome in outcomes)
    with capsys.disabled():
        print(
            f"\nkill -9 of the scheduler of group {group}: led by the other after {taken_s:.2f} s"
            f" (lease {LEASE_S:g} s, grace {GRACE_S:g} s); {dict(kinds)} requests, "
            f"{len(outcomes) - sum(errors.values())} answered, errors {dict(errors)}, longest"
            f" {longest:.2f} s; groups led now: {[g.scheduler_id for g in after.groups]}"
        )
    assert not errors
    assert all(outcome.right for outcome in outcomes)
    assert taken_s < LEASE_S + GRACE_S + 2.0
    assert [g.scheduler_id for g in after.groups].count("scheduler-0") >= 1
    assert after.groups[group].epoch > status.groups[group].epoch
