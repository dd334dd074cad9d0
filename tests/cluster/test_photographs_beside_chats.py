"""Photographs and a chat on one agent take turns, and nobody takes the agent for slow.

The agent is emulated, so that a batch and a step take known times. What was computed of both in
some time can be no more than that time, if the device was used by one at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import catenary
from catenary_lab.live.cluster import EMULATED, LiveCluster
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions
from fault_cluster import IMAGES, TEXTS, shared_models

pytestmark = pytest.mark.timeout(600)  # the first test of all makes the models

BLOCKS = 6
BATCH_NS, STEP_NS = 20_000_000, 30_000_000
PHOTOGRAPHS = 60
TOKENS = 110


def agent(folder: Path, blocks: int) -> dict[str, object]:
    """Returns the settings of the agent, and writes the times that it emulates."""
    times = {
        "prefill_ns": 1_000_000 / BLOCKS,
        "prefill_token_ns": 20_000 / BLOCKS,
        "decode_ns": STEP_NS / BLOCKS,
        "decode_session_ns": 0,
    }
    profile = folder / "both.json"
    profile.write_text(json.dumps({TEXTS: times, IMAGES: {f"0-{blocks}": [BATCH_NS]}}))
    return {"agent_id": "both", "device": "emulated:both", "emulated_profile": profile}


async def test_a_device_is_used_by_photographs_and_a_chat_in_turns(tmp_path: Path) -> None:
    shutil.copytree(shared_models(), tmp_path / "models", copy_function=os.link)
    blocks = ModelRepository(tmp_path / "models").block_table(ModelKey(IMAGES, "1")).blocks
    pipeline = {"batch": 1, "partitions": [{"blocks": [0, blocks], "agents": ["both"]}]}
    chain = {"capacity": 4, "hops": [{"agent": "both", "blocks": [0, BLOCKS]}]}
    plan = {
        "models": [
            {"name": IMAGES, "slo_ms": 30_000, "pipelines": [pipeline]},
            {"name": TEXTS, "chains": [chain]},
        ]
    }
    options = ClusterOptions(
        1,
        device="emulated:both",
        models=(IMAGES, TEXTS),
        each_agent=(agent(tmp_path, blocks),),
    )
    moments: list[float] = []

    async def chat(client: catenary.AsyncClient) -> None:
        wanted = {"max_tokens": TOKENS, "ignore_eos": True}
        async for _ in client.generate(TEXTS, "w5 w6 w7", stream=True, **wanted):
            moments.append(time.monotonic())

    cluster = LiveCluster(options, tmp_path, EMULATED, {}, plan)
    async with cluster.serving(lambda _: None), cluster.client(120.0) as client:
        spec = (await client.model_metadata(IMAGES)).inputs[0]
        picture = {spec.name: np.zeros((1, *spec.shape[1:]), np.float32)}
        await client.infer(IMAGES, picture)
        talking = asyncio.create_task(chat(client))
        while len(moments) < 3:
            assert not talking.done(), "the chat ended before it began"
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        photographs = 0
        while photographs < PHOTOGRAPHS and not talking.done():
            await client.infer(IMAGES, picture)
            photographs += 1
        end = time.monotonic()
        (status,) = (await client.status()).agents
        await talking
    # Tokens that arrived meanwhile were computed meanwhile, but for one on its way at the start.
    steps = sum(begin < moment <= end for moment in moments) - 1
    assert steps > 3
    spent_ns = photographs * BATCH_NS + steps * STEP_NS
    assert spent_ns <= (end - begin) * 1e9
    assert not status.impairments
