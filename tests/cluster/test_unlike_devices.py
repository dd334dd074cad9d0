"""Unlike devices are planned together though nobody profiled the model, each at its own pace.

One new device and two old ones are emulated from their data sheets, all slower by one factor, which
the data sheets do not tell: what agents measure when they load corrects the estimates.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import catenary
from catenary_lab.live.cluster import EMULATED, LiveCluster
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions
from cluster_harness import MODEL
from fault_cluster import install_images

SLOWDOWN = 150.0
DEVICES = ("L4", "P4", "P4")
SLO_NS = 4_000_000_000
AT_ONCE = 24
BUSY = 0.5
LONGEST_S = 90.0


def options(folder: Path) -> ClusterOptions:
    key = install_images(folder / "models")
    repository = ModelRepository(folder / "models")
    repository.write_manifest(replace(repository.manifest(key), slo_ns=SLO_NS))
    agents = tuple(
        {
            "agent_id": f"agent-{number}",
            "device": f"emulated:{name}",
            "device_class": name,
            "emulated_slowdown": SLOWDOWN,
            "threads": 1,
        }
        for number, name in enumerate(DEVICES)
    )
    return ClusterOptions(3, device="emulated:any", models=(MODEL,), each_agent=agents)


async def all_busy(client: catenary.AsyncClient) -> dict[str, float]:
    """Returns how busy the agents are, once all of them are."""
    deadline, busy = time.monotonic() + LONGEST_S, dict[str, float]()
    while time.monotonic() < deadline:
        busy = {a.agent_id: a.utilisation_ratio for a in (await client.status()).agents}
        if min(busy.values()) > BUSY:
            return busy
        await asyncio.sleep(0.5)
    pytest.fail(f"not all agents became busy: {busy}")


async def test_a_new_device_and_two_old_ones_are_all_used_without_a_profile(
    tmp_path: Path,
) -> None:
    live = LiveCluster(options(tmp_path), tmp_path, EMULATED, {"expected_agents": 3})
    picture = np.zeros((1, 3, 224, 224), np.float32)
    async with live.serving(lambda _: None), live.client(60.0) as client:
        name = (await client.model_metadata(MODEL)).inputs[0].name

        async def ask() -> None:
            while True:
                await client.infer(MODEL, {name: picture})

        asking = [asyncio.create_task(ask()) for _ in range(AT_ONCE)]
        await all_busy(client)
        told = (await client.plan()).explanation
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert "data sheet" in told
    assert "survives the loss of any one agent" in told
    assert " idle: " not in told
