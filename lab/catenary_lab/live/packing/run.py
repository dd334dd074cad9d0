"""Live migration on real processes: running sessions are moved, and an agent is drained.

A cluster serves a real language model. Every prompt is answered once undisturbed; then sessions
with the same prompts are moved from chain to chain through `Admin.MoveSession` while they generate,
by turns by their caches and by their tokens; then one agent's sessions run on when it is drained.
Greedy answers are the same with and without.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import catenary
from catenary_lab.live.cluster import REAL, LiveCluster, Progress
from catenary_lab.live.models import install
from catenary_lab.live.packing.figures import (
    Answer,
    Drained,
    LayoutMeasured,
)
from catenary_lab.live.packing.load import MODES, Mover, Streams, answer_of
from catenary_lab.scenarios.packing.live_schema import LayoutSpec, LiveMoves
from catenary_services.errors import Unavailable
from catenaryd.local.local_cluster import ClusterOptions, free_port

_MOVE_S = 60.0
"""Seconds that a move may take: one that a slow machine delays must not be given up too early."""
_DRAIN_S = 60.0
_GATHER_S = 60.0
_POLL_S = 0.05
_CACHE_BYTES = "catenary_cache_bytes_total"


async def run_live(run: LiveMoves, folder: Path, progress: Progress) -> list[LayoutMeasured]:
    """Returns what real processes make of moves, for each layout of the scenario.

    Raises:
        Unavailable: A cluster was not ready in time, or could not do what was asked of it.
    """
    measured = []
    for number, layout in enumerate(run.layouts):
        own = folder / str(number)
        progress(f"{layout.label}: preparing {run.model}")
        await asyncio.to_thread(
            install,
            run.model,
            own / "models",
            session_tokens=run.session_tokens,
            max_batch=run.max_batch,
            objectives=None,
        )
        serving = _cluster(run, layout, own).serving(progress)
        async with serving as cluster, cluster.client() as client:
            measured.append(await _measured(run, layout, cluster, client, progress))
    return measured


async def _measured(
    run: LiveMoves,
    layout: LayoutSpec,
    cluster: LiveCluster,
    client: catenary.AsyncClient,
    progress: Progress,
) -> LayoutMeasured:
    started = time.monotonic()
    streams = Streams(client, run.model, run.streams)
    progress(f"{layout.label}: {run.prompts} undisturbed answers")
    reference = await streams.all_of(range(run.prompts), run.longest_answer)
    lost = next((each.problem for each in reference if each.problem), "")
    if lost:
        raise Unavailable(f"an undisturbed answer was lost: {lost}")
    before = await _cache_bytes(cluster)
    mover = Mover(client, run.model, layout.moves, run.seed)
    answers = await _while_moving(run, mover, streams, progress)
    sent = await _cache_bytes(cluster) - before
    drained = None
    if layout.drained:
        progress(f"{layout.label}: draining an agent with {layout.drained} sessions")
        drained = await _drain(run, layout, client, mover)
    status = await client.status()
    chains = tuple(
        ", ".join(f"{agent} [{first},{last})" for agent, first, last in chain.hops)
        for model in status.models
        for chain in model.chains
    )
    return LayoutMeasured(
        layout,
        chains,
        reference,
        answers,
        tuple(mover.moved),
        sent,
        drained,
        time.monotonic() - started,
    )


async def _while_moving(
    run: LiveMoves, mover: Mover, streams: Streams, progress: Progress
) -> tuple[Answer, ...]:
    """Keeps streams running until enough of them have moved; returns all answers."""
    answers: list[Answer] = []

    async def stream(number: int) -> None:
        while not mover.is_done:
            answers.append(await streams.one(number % run.prompts, run.answer_tokens))
            number += run.streams

    def tell() -> None:
        kv, tokens = (mover.done(mode) for mode in MODES)
        if (kv + tokens) % 20 == 0:
            progress(f"{kv} moves by kv, {tokens} by tokens")

    running = [asyncio.create_task(stream(number)) for number in range(run.streams)]
    moving = [asyncio.create_task(mover.run(tell)) for _ in range(run.abreast)]
    try:
        await asyncio.gather(*moving)
        await asyncio.gather(*running)
    finally:
        for task in (*moving, *running):
            task.cancel()
        await asyncio.gather(*moving, *running, return_exceptions=True)
    return tuple(answers)


async def _drain(
    run: LiveMoves, layout: LayoutSpec, client: catenary.AsyncClient, mover: Mover
) -> Drained:
    """Gathers sessions on one agent, and drains it."""
    model = next(each for each in (await client.status()).models if each.chains)
    chain = model.chains[0]
    agent = chain.hops[0][0]
    running = [
        asyncio.create_task(
            answer_of(client, run.model, number % run.prompts, run.drained_answer_tokens)
        )
        for number in range(layout.drained)
    ]
    try:
        sessions = await _gathered(client, mover, chain.chain_id, running)
        started = time.monotonic()
        is_drained = await client.drain(agent, timeout_s=_DRAIN_S)
        seconds = time.monotonic() - started
        answers = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return Drained(sessions, seconds, is_drained, tuple(answers))


async def _gathered(
    client: catenary.AsyncClient,
    mover: Mover,
    chain_id: str,
    running: list[asyncio.Task[Answer]],
) -> int:
    """Moves every session to one chain until all generate there; returns how many are there."""
    deadline = time.monotonic() + _GATHER_S
    while True:
        sessions = await client.sessions()
        others = [each for each in sessions if each.chain_id != chain_id]
        is_over = any(task.done() for task in running) or time.monotonic() > deadline
        generate = all(each.generates for each in sessions)
        if is_over or (len(sessions) >= len(running) and not others and generate):
            return len(sessions) - len(others)
        for session in others:
            if session.generates and not session.moving_to:
                await mover.move(session, chain_id, "kv", wait_s=0.0)
        await asyncio.sleep(_POLL_S)


def _cluster(run: LiveMoves, layout: LayoutSpec, folder: Path) -> LiveCluster:
    agents = tuple({"threads": 1, "metrics_port": free_port()} for _ in range(run.agents))
    return LiveCluster(
        ClusterOptions(agents=run.agents, models=(run.model,), each_agent=agents),
        folder,
        REAL,
        {"packing": "off", "chain_agents": 1, "move_timeout_s": _MOVE_S},
        plan_document(run, layout) if layout.chains else None,
    )


async def _cache_bytes(cluster: LiveCluster) -> int:
    """Returns how many bytes of caches have left agents for others so far."""
    return round(sum(await cluster.counted(_CACHE_BYTES)))


def plan_document(run: LiveMoves, layout: LayoutSpec) -> dict[str, object]:
    """Returns a layout in the form `catenaryd up --plan` reads."""
    chains = [
        {
            "capacity": run.max_batch,
            "hops": [{"agent": f"agent-{hop.agent}", "blocks": list(hop.blocks)} for hop in hops],
        }
        for hops in layout.chains
    ]
    return {"models": [{"name": run.model, "chains": chains}]}
