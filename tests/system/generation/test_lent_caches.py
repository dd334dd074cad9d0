"""Caches of moved sessions pass in memory that agents of one host lend each other, not in frames.

Real processes, the real model, computed with PyTorch. Each of two agents serves it whole. Answers
run one after the other. A moved one takes its caches with it, and ends as it does undisturbed.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import catenary
from fault_cluster import FaultCluster, fault_cluster, nothing_is_booked
from language_model import install

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

MODEL = "smollm2-135m"
BLOCKS = 30
AGENTS = ("agent-0", "agent-1")
TOKENS = 48
PROMPT = "Once upon a time, in a harbour town, there was a bakery that never closed. " * 4
"""Long enough that its caches are worth lending: small ones leave in frames."""
MOVES = 3
"""One of them goes where another went: memory is offered when caches first go to an agent."""
ATTEMPTS = 10
"""More than enough, though on a busy machine an answer may end before it was moved."""


async def test_caches_of_moves_are_lent(tmp_path: Path) -> None:
    root = tmp_path / "models"
    install(root)
    chains = [{"capacity": 4, "hops": [{"agent": each, "blocks": [0, BLOCKS]}]} for each in AGENTS]
    kinds: dict[str, dict[str, Any]] = {
        "scheduler": {"models": [MODEL]},
        "gateway": {},
        "agent": {"decoder": "torch"},
    }
    overrides = {kind: {"model_repository": root, **more} for kind, more in kinds.items()}
    placement = {"models": [{"name": MODEL, "chains": chains}]}
    async with (
        fault_cluster(tmp_path, overrides=overrides, texts=False, placement=placement) as cluster,
        cluster.client(timeout_s=120.0) as client,
    ):
        expected = await answer(client, moves=False)
        for _ in range(MOVES):
            await moved_once(client, expected)
        await nothing_is_booked(client)
        passed = await cache_bytes(cluster)
        assert passed["host"] > 0, passed


async def moved_once(client: catenary.AsyncClient, expected: Seen) -> None:
    """Asks until an answer was moved, and moved answers are as expected."""
    for _ in range(ATTEMPTS):
        seen = await answer(client, moves=True)
        assert seen.tokens == expected.tokens
        if seen.moved:
            return
    raise AssertionError(f"none of {ATTEMPTS} answers could be moved")


class Seen:
    """The tokens of an answer, and whether it was moved with its caches."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.moved = False


async def answer(client: catenary.AsyncClient, *, moves: bool) -> Seen:
    seen = Seen()
    moving: asyncio.Task[bool] | None = None
    options = {"max_tokens": TOKENS, "ignore_eos": True}
    async for piece in client.generate(MODEL, PROMPT, stream=True, **options):
        seen.tokens += piece.token_ids
        if moves and moving is None:
            moving = asyncio.create_task(move(client))
    if moving is not None:
        seen.moved = await moving
    return seen


async def move(client: catenary.AsyncClient) -> bool:
    """Moves the only session, once it generates, to the other chain; False if it ended before."""
    chains = [chain.chain_id for m in (await client.status()).models for chain in m.chains]
    while sessions := await client.sessions():
        session = sessions[0]
        if session.generates:
            to = next(chain for chain in chains if chain != session.chain_id)
            try:
                done = await client.move_session(session.session_id, chain_id=to, mode="kv")
            except catenary.CatenaryError:
                return False
            return done.outcome == "moved"
        await asyncio.sleep(0.02)
    return False


async def cache_bytes(cluster: FaultCluster) -> Counter[str]:
    """Returns the bytes of caches that all agents passed on, by the way they took."""
    found: Counter[str] = Counter()
    for agent in AGENTS:
        text = await cluster.metrics(agent)
        for labels, value in re.findall(r"^catenary_cache_bytes_total\{(.*)\} (\S+)", text, re.M):
            way = re.search(r'way="(\w+)"', labels)
            assert way is not None
            found[way.group(1)] += round(float(value))
    return found
