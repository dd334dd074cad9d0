"""Changes of plan under steady load, with real processes and the real model: nothing is lost.

Agents have room for 20 MB: enough for some plans side by side, not for others. Every request must
end with the right answer, whatever the cluster is doing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import catenary
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.profile import DeviceProfile, ModelProfile
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.demo_models import preprocess, sample_photographs
from cluster_harness import MODEL, RunningCluster, running_cluster
from fault_cluster import install_images

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

RATE_PER_S = 8.0
SLO_MS = 15_000
"""Generous, because two cores serve, load and measure at once: what is tested is that nothing is
lost, and the longest latency is printed."""
MEMORY_BYTES = 20_000_000
"""Blocks [0, 8) have 3.8 MB of weights, [8, 10) have 14.9 MB, the whole model 18.7 MB."""


def plan(*pipelines: list[tuple[int, int, list[str]]], batch: int = 4) -> dict[str, Any]:
    return {
        "models": [
            {
                "name": MODEL,
                "slo_ms": SLO_MS,
                "pipelines": [
                    {
                        "batch": batch,
                        "partitions": [
                            {"blocks": [first, last], "agents": agents}
                            for first, last, agents in stages
                        ],
                    }
                    for stages in pipelines
                ],
            }
        ]
    }


HEAD_AND_TAIL = plan([(0, 8, ["agent-0", "agent-1"]), (8, 10, ["agent-2"])])
THREE_PARTS = plan([(0, 5, ["agent-0"]), (5, 8, ["agent-1"]), (8, 10, ["agent-2"])])
WHOLE_ON_TWO = plan([(0, 10, ["agent-0", "agent-1"])])
TOO_LARGE_A_BATCH = plan([(0, 5, ["agent-0"]), (5, 10, ["agent-1"])], batch=5_000)
TOO_MUCH_FOR_ONE = plan([(0, 10, ["agent-0"])], [(0, 9, ["agent-0"]), (9, 10, ["agent-1"])])


@dataclass
class Outcome:
    sent_s: float
    answered_s: float = 0.0
    error: str = ""
    right: bool = False


@dataclass
class Load:
    """Steady open-loop load; every request is accounted for."""

    client: catenary.AsyncClient
    images: list[np.ndarray]
    expected: list[int]
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        model = await self.client.model_metadata(MODEL)
        names = model.inputs[0].name, model.outputs[0].name
        start, requests = time.monotonic(), []
        while not stop.is_set():
            requests.append(asyncio.create_task(self._one(len(requests), *names)))
            delay = start + len(requests) / RATE_PER_S - time.monotonic()
            await asyncio.wait([asyncio.ensure_future(stop.wait())], timeout=max(0.0, delay))
        await asyncio.gather(*requests)

    async def _one(self, number: int, tensor: str, output: str) -> None:
        outcome = Outcome(time.monotonic())
        self.outcomes.append(outcome)
        index = number % len(self.images)
        try:
            answer = await self.client.infer(
                MODEL, {tensor: self.images[index]}, slo_ms=SLO_MS, timeout_s=SLO_MS / 1e3 + 5
            )
            outcome.right = int(answer.outputs[output][0].argmax()) == self.expected[index]
        except catenary.CatenaryError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.answered_s = time.monotonic()

    def longest_s(self) -> float:
        return max(each.answered_s - each.sent_s for each in self.outcomes)

    def nothing_was_lost(self) -> None:
        assert self.outcomes
        assert Counter(each.error for each in self.outcomes if each.error) == {}
        assert all(each.right for each in self.outcomes), "a wrong answer"


@asynccontextmanager
async def under_load(cluster: RunningCluster) -> AsyncIterator[tuple[catenary.AsyncClient, Load]]:
    images = [preprocess(sample_photographs()[name]) for name in ("chelsea", "coffee", "rocket")]
    async with catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin) as client:
        model = await client.model_metadata(MODEL)
        tensor, output = model.inputs[0].name, model.outputs[0].name
        answers = [await client.infer(MODEL, {tensor: image}, timeout_s=20) for image in images]
        expected = [int(answer.outputs[output][0].argmax()) for answer in answers]
        load, stop = Load(client, images, expected), asyncio.Event()
        running = asyncio.create_task(load.run(stop))
        try:
            await asyncio.sleep(1.0)
            yield client, load
            await asyncio.sleep(1.0)
        finally:
            stop.set()
            await running


def in_words(switch: catenary.PlanSwitch) -> str:
    pauses = [f"{each.downtime_ns / 1e6:.0f} ms" for each in switch.downtime] or ["none"]
    return f"{switch.phase} after {switch.duration_ns / 1e9:.2f} s, pause {', '.join(pauses)}" + (
        f" ({switch.problem})" if switch.problem else ""
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    install_images(tmp_path / "models")
    config = {
        "agent": {"memory_bytes": MEMORY_BYTES},
        # Agents that load, measure and serve on two cores are late, not lost.
        "scheduler": {"load_attempts": 2, "overdue_grace_ms": 2_000},
    }
    with running_cluster(tmp_path, placement=HEAD_AND_TAIL, config=config) as running:
        yield running


async def test_plans_change_to_and_fro_under_load_and_nothing_is_lost(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        ("fits beside the old plan", THREE_PARTS, "done", False),
        ("and back", HEAD_AND_TAIL, "done", False),
        ("does not fit beside it", WHOLE_ON_TWO, "done", True),
        ("and back", HEAD_AND_TAIL, "done", True),
        ("an agent refuses to load", TOO_LARGE_A_BATCH, "rolled back", False),
        ("an agent turns out too small", TOO_MUCH_FOR_ONE, "rolled back", False),
        ("again to three parts", THREE_PARTS, "done", False),
    ]
    told = []
    async with under_load(cluster) as (client, load):
        for name, document, phase, pauses in steps:
            answered = len(load.outcomes)
            try:
                await client.apply_plan(document, timeout_s=90)
            except catenary.PlanInfeasibleError:
                assert phase == "rolled back"
            shown = await client.plan()
            switch = shown.last_switch
            assert switch is not None
            told.append(f"{name}: {in_words(switch)}, {len(load.outcomes) - answered} requests")
            assert switch.phase == phase, switch
            assert bool(switch.downtime) == pauses, switch
            if phase == "done":
                assert shown.plan_id == switch.to_plan
            await asyncio.sleep(1.0)
    with capsys.disabled():
        print("\n" + "\n".join(told))
        print(f"{len(load.outcomes)} requests, longest {load.longest_s():.2f} s")
    load.nothing_was_lost()


async def test_a_scheduler_killed_in_a_switch_is_followed_by_one_that_ends_it(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    async with under_load(cluster) as (client, load):
        applying = asyncio.create_task(client.apply_plan(WHOLE_ON_TWO, timeout_s=60))
        await asyncio.sleep(0.3)  # on its way to Redis, and not over
        cluster.kill("scheduler")
        await asyncio.gather(applying, return_exceptions=True)
        deadline = time.monotonic() + 60
        while not await is_in_force(client, WHOLE_ON_TWO):
            assert time.monotonic() < deadline, "the switch did not come to an end"
            await asyncio.sleep(0.2)
    with capsys.disabled():
        print(f"\nkilled in a switch: {len(load.outcomes)} requests, {load.longest_s():.2f} s")
    load.nothing_was_lost()


async def is_in_force(client: catenary.AsyncClient, document: dict[str, Any]) -> bool:
    try:
        shown = await client.plan()
    except catenary.CatenaryError:
        return False
    wanted = document["models"][0]["pipelines"]
    return bool(shown.document["models"][0]["pipelines"] == wanted)


def add_profile(root: Path, key: ModelKey) -> None:
    """Writes what `catenaryd profile` would: here from the block times of the preparation."""
    repository = ModelRepository(root)
    table = repository.block_table(key)
    rows = tuple((ns, 2 * ns, 4 * ns) for ns in table.compute_ns)
    device = DeviceProfile("cpu", 1, True, "the block table", (1, 2, 4), rows, rows)
    cuts = (0, *(b.wire_row_bytes(float16=True) for b in table.boundaries[1:-1]), 0)
    weights = (400_000,) * 8 + (7_500_000,) * 2
    repository.write_profile(
        key, ModelProfile(key, table.model_hash, table.blocks, cuts, weights, (device,))
    )


async def test_the_pooled_planner_serves_and_plans_anew_without_a_killed_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_profile(tmp_path / "models", install_images(tmp_path / "models"))
    # The second agent stays away for longer than the planner waits for it.
    config = {
        "scheduler": {"replan_after_s": 0.0, "overdue_grace_ms": 2_000},
        "agent": {"device_class": "cpu"},  # as the profile calls it
    }
    with running_cluster(tmp_path, config=config) as running:
        async with under_load(running) as (client, load):
            shown = await client.plan()
            assert shown.planner == "pooled", shown.explanation
            assert "rows/s" in shown.explanation
            assert "times of efficientnet-lite0:1 on cpu are estimates" in shown.explanation
            running.kill("agent-1")
            deadline = time.monotonic() + 60
            while (switch := (await client.plan()).last_switch) is None or switch.phase != "done":
                assert time.monotonic() < deadline, "no other plan came into force"
                await asyncio.sleep(0.2)
            await asyncio.sleep(8.0)  # it is restarted, and planned with again
            again = await client.replan(timeout_s=60)
    with capsys.disabled():
        print(f"\nplanned anew because {switch.cause}: {in_words(switch)}")
        print(f"and by hand: {again.plan_id}, changed: {again.changed}")
        print(f"{len(load.outcomes)} requests, longest {load.longest_s():.2f} s")
    load.nothing_was_lost()
