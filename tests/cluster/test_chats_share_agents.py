"""Three chats on two idle machines use both, although one of them is faster.

Two unlike emulated agents serve a model whole, each by a chain of its own. A step of either takes
longer with two sessions than with one, so the second chat is predicted to delay the first by more
on the fast machine than it loses on the slow one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

import catenary
from catenary_lab.live.cluster import EMULATED, LiveCluster
from catenaryd.local.local_cluster import ClusterOptions
from fault_cluster import TEXTS, shared_models

pytestmark = pytest.mark.timeout(600)  # the first test of all makes the model

BLOCKS = 6
TOKENS = 100
STEP_NS, SESSION_NS = 60_000_000, 40_000_000
"""Of the fast agent: a step takes 100 ms for one session, and 140 ms for two. No answer ends before
all of them were seen to be generated, however busy the machine is."""
SLOWER = 1.4
KNOWN_S = 60.0


def agents(folder: Path) -> tuple[dict[str, object], ...]:
    """Returns the settings of the agents, and writes the times that they emulate."""
    found = []
    for name, factor in (("fast", 1.0), ("slow", SLOWER)):
        profile = folder / f"{name}.json"
        times = {
            "prefill_ns": 1_000_000 * factor / BLOCKS,
            "prefill_token_ns": 20_000 * factor / BLOCKS,
            "decode_ns": STEP_NS * factor / BLOCKS,
            "decode_session_ns": SESSION_NS * factor / BLOCKS,
        }
        profile.write_text(json.dumps({TEXTS: times}))
        found.append(
            {
                "agent_id": name,
                "device": f"emulated:{name}",
                "device_class": name,
                "emulated_profile": profile,
                "threads": 1,
            }
        )
    return tuple(found)


async def known_lines(client: catenary.AsyncClient) -> None:
    """Returns once the scheduler has latency lines of both chains."""
    deadline = time.monotonic() + KNOWN_S
    while time.monotonic() < deadline:
        models = (await client.status()).models
        chains = [chain for model in models for chain in model.chains if model.name == TEXTS]
        if len(chains) == 2 and all(chain.lines is not None for chain in chains):
            return
        await asyncio.sleep(0.2)
    pytest.fail("the latency lines of the chains are not known")


async def used(client: catenary.AsyncClient, chats: int) -> Counter[str]:
    """Returns how many chats each agent has, once all of them generate at the same time."""

    async def chat() -> None:
        options = {"max_tokens": TOKENS, "ignore_eos": True}
        async for _ in client.generate(TEXTS, "w5 w6 w7 w8 w9", stream=True, **options):
            pass

    running = []
    for number in range(chats):
        running.append(asyncio.create_task(chat()))
        while len(found := await client.sessions(TEXTS)) <= number:
            assert not any(task.done() for task in running), "an answer ended too early"
            await asyncio.sleep(0.02)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return Counter(session.hops[0][0] for session in found)


async def test_three_chats_use_both_of_two_unlike_agents(tmp_path: Path) -> None:
    shutil.copytree(shared_models(), tmp_path / "models", copy_function=os.link)
    chains = [
        {"capacity": 8, "hops": [{"agent": name, "blocks": [0, BLOCKS]}]}
        for name in ("fast", "slow")
    ]
    options = ClusterOptions(2, device="emulated:any", models=(TEXTS,), each_agent=agents(tmp_path))
    plan = {"models": [{"name": TEXTS, "chains": chains}]}
    cluster = LiveCluster(options, tmp_path, EMULATED, {}, plan)
    async with cluster.serving(lambda _: None), cluster.client(120.0) as client:
        await known_lines(client)
        chats = await used(client, 3)
    assert chats.total() == 3
    # Which of them gets two is up to what steps are measured to take beside everything else.
    assert set(chats) == {"fast", "slow"}
