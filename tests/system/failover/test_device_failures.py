"""Devices that fail, for good or now and then, and threads that hang: with real processes.

What goes wrong is what the agents' file of faults says (`catenary_agent.supervision.faults`); whoever ends is
started anew, as a supervisor would.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import catenary
import figures
from catenary_agent.supervision.termination import EXIT_DEVICE_LOST, EXIT_STUCK
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.demo_models import preprocess, sample_photographs
from fault_cluster import (
    IMAGES,
    FaultCluster,
    fault_cluster,
    nothing_is_booked,
    shared_models,
    until,
    until_status,
)
from machine_faults.fault_load import Shape, prepared_load

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

REQUESTS, AT_ONCE = 200, 8
STUCK_S = 2.0
HUNG_LIMIT_S = STUCK_S + 4.0
"""A hung thread's streams go on within: its bound, two heartbeats, and a start elsewhere."""
STICKY = "CUDA error: an illegal memory access was encountered"


class Faults:
    """The files of faults of a cluster's agents."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def file(self, agent: str) -> Path:
        return self._folder / f"{agent}.json"

    def say(self, agent: str, **fault: object) -> None:
        fresh = self.file(agent).with_suffix(".new")
        fresh.write_text(json.dumps(fault))
        fresh.replace(self.file(agent))

    def settings(self, *agents: str) -> dict[str, dict[str, Any]]:
        return {
            agent: {"faults_file": self.file(agent), "allow_faults": True, "heartbeat_s": 0.5}
            for agent in agents
        }


@asynccontextmanager
async def supervised(cluster: FaultCluster) -> AsyncIterator[list[tuple[str, int]]]:
    """Starts agents anew that end; yields who ended, and with which code."""
    ended: list[tuple[str, int]] = []

    async def keep() -> None:
        while True:
            for name, member in cluster.members.items():
                if member.kind == "agent" and not member.is_running and member.process is not None:
                    ended.append((name, member.process.returncode))
                    await asyncio.sleep(0.3)
                    member.start()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(keep())
    try:
        yield ended
    finally:
        task.cancel()


def whole_on_both(repository: Path) -> dict[str, object]:
    blocks = ModelRepository(repository).block_table(ModelKey(IMAGES, "1")).blocks
    parts = [{"blocks": [0, blocks], "agents": ["agent-0", "agent-1"]}]
    pipelines = [{"batch": 2, "partitions": parts}]
    return {"models": [{"name": IMAGES, "slo_ms": 20_000, "pipelines": pipelines}]}


async def answered(client: catenary.AsyncClient, requests: int) -> int:
    """Asks so many times, several at once; returns how many answers were right."""
    image = preprocess(sample_photographs()["coffee"])
    expected = await label(client, image)
    places = asyncio.Semaphore(AT_ONCE)

    async def one() -> bool:
        async with places:
            return await label(client, image) == expected

    return sum(await asyncio.gather(*(one() for _ in range(requests))))


async def label(client: catenary.AsyncClient, image: np.ndarray) -> int:
    answer = await client.infer(IMAGES, {"image": image}, slo_ms=20_000, timeout_s=25.0)
    return int(np.argmax(next(iter(answer.outputs.values()))[0]))


async def ready_again(client: catenary.AsyncClient, agent: str) -> None:
    def is_back(status: catenary.ClusterStatus) -> bool:
        return {a.agent_id: a.state for a in status.agents}.get(agent) == "ready"

    await until_status(client, is_back, 60.0)


@pytest.mark.parametrize(
    ("name", "fault", "code"),
    [
        ("fails", {"fail": "the kernel said no"}, None),
        ("is lost", {"fail": STICKY, "once": True}, EXIT_DEVICE_LOST),
    ],
    ids=["fails", "lost"],
)
async def test_a_device_that_fails_costs_no_request(
    tmp_path: Path, name: str, fault: dict[str, Any], code: int | None
) -> None:
    faults = Faults(tmp_path / "faults")
    async with (
        fault_cluster(
            tmp_path,
            texts=False,
            placement=whole_on_both(shared_models()),
            overrides=faults.settings("agent-0"),
        ) as cluster,
        cluster.client() as client,
        supervised(cluster) as ended,
    ):
        test, failing = f"device of agent-0 {name}", cluster["agent-0"]
        assert await answered(client, 20) == 20
        pid = failing.pid
        assert await batches(cluster, "agent-0") > 0
        faults.say("agent-0", **fault)
        right = await answered(client, REQUESTS)
        figures.report(test, "requests lost", REQUESTS - right, f"of {REQUESTS}", "0")
        assert right == REQUESTS
        if code is not None:
            await until(lambda: happened(lambda: bool(ended)), 20.0, "the end of the process")
            assert ended[0] == ("agent-0", code)
        else:
            faults.file("agent-0").unlink()
        await ready_again(client, "agent-0")
        # One process ended, once, and another one came; where none had to end, none did.
        assert ended == ([("agent-0", code)] if code is not None else [])
        assert (failing.pid != pid) == (code is not None)
        served = await batches(cluster, "agent-0")
        assert await answered(client, 20) == 20
        while (more := await batches(cluster, "agent-0") - served) == 0:  # the test has a limit
            assert await answered(client, 20) == 20
        said = f"process {failing.pid}, {pid} before"
        figures.report(test, "batches served afterwards", more, f"({said})", "> 0")
        await nothing_is_booked(client)


async def batches(cluster: FaultCluster, agent: str) -> int:
    """Returns how many batches the process that is this agent now has computed and sent on."""
    pattern = r'^catenary_batches_total\{[^}]*outcome="OK"[^}]*\} (\S+)'
    found = re.findall(pattern, await cluster.metrics(agent), re.MULTILINE)
    return round(sum(map(float, found)))


async def happened(condition: Callable[[], bool]) -> bool:
    return condition()


@pytest.mark.parametrize("victim", ["agent-0", "agent-4"], ids=["images", "texts"])
async def test_a_thread_that_hangs_is_found_and_its_work_goes_on_elsewhere(
    tmp_path: Path, victim: str
) -> None:
    test = f"compute of {victim} hangs"
    faults = Faults(tmp_path / "faults")
    overrides = {"scheduler": {"stuck_s": STUCK_S}, **faults.settings(victim)}
    async with (
        fault_cluster(tmp_path, overrides=overrides) as cluster,
        cluster.client() as client,
        supervised(cluster) as ended,
        prepared_load(cluster, Shape(images_per_s=6.0, images_at_once=3, texts_per_s=2.0)) as load,
    ):
        async with load.running():
            await load.for_s(2.0)
            fault_s = load.now_s
            faults.say(victim, hang=True, once=True)
            await until(lambda: happened(lambda: bool(ended)), 40.0, "the end of the process")
            ended_s = load.now_s - fault_s
            await ready_again(client, victim)
            await load.for_s(3.0)
        load.report(test, fault_s)
        figures.report(test, "the process had ended after", ended_s, "s", "")
        assert ended == [(victim, EXIT_STUCK)]
        load.nothing_was_lost()
        pauses = [each.longest_pause_s for each in load.of("text", fault_s - 10.0)]
        figures.report(test, "longest pause of a stream", max(pauses), "s", f"<= {HUNG_LIMIT_S:g}")
        assert max(pauses) <= 4 * HUNG_LIMIT_S  # on a machine that is busy with other things
        await nothing_is_booked(client)
