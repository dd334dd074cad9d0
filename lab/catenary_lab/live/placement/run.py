"""Placement and scaling on real processes: a real language model under a load in steps.

One agent serves the model and works for some seconds. Its latency lines then decide the objectives
and what a load of 1 is, so that the run means the same on any machine. The model gets its
objectives by being deployed again. Then requests arrive in Poisson steps, through the SDK and gRPC,
while agents come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import catenary
from catenary.types import LatencyInfo
from catenary_lab.live.cluster import REAL, LiveCluster, Progress
from catenary_lab.live.generator import run_load
from catenary_lab.live.models import install
from catenary_lab.live.placement.load import Answered, Asked, Steps
from catenary_lab.live.placement.steps import (
    AgentsAt,
    StepsMeasured,
    drawn,
    objectives_for,
)
from catenary_lab.live.waiting import until, within
from catenary_lab.scenarios.placement.live_schema import LiveSteps
from catenary_scheduler.scaling.workers.workers_line import SessionLengths, capability
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions

_POLL_S = 0.25
_KNOWN_S = 30.0
_WARM_UP_REQUESTS = 12
_APART_S = 0.9
_REPORTED_S = 2.5
"""Seconds within which agents have reported: they report every second or so."""


async def run_live(run: LiveSteps, folder: Path, progress: Progress) -> StepsMeasured:
    """Returns what real processes make of a stepped load.

    Raises:
        Unavailable: The cluster was not ready in time, or nothing was known of the model in time.
    """
    started = time.monotonic()
    progress(f"preparing {run.model}")
    key = await asyncio.to_thread(
        install,
        run.model,
        folder / "models",
        session_tokens=run.session_tokens,
        max_batch=run.max_batch,
        objectives=None,
    )
    async with (
        _cluster(run, folder).serving(progress) as cluster,
        cluster.client(_KNOWN_S) as client,
    ):
        await _warm_up(run, cluster, key)
        lines = await _lines(client)
        objectives = objectives_for(run, lines)
        await _hold_to(client, ModelRepository(folder / "models"), key, objectives)
        lengths = SessionLengths(run.prompt.mean, run.answer.mean)
        worker = capability(lines, objectives, lengths, run.max_batch, run.theta)
        asked = drawn(run, worker.rate_per_s)
        progress(f"a load of 1 is {worker.rate_per_s:.2f} requests/s; {len(asked)} of them")
        async with _watched(client) as agents:  # a slow machine may have more than one already
            await _settled(agents, run.settle_s)
        async with _watched(client) as agents:
            answered, lag_s = await _load(run, cluster, key, objectives, asked)
            await _settled(agents, run.settle_s)
        return StepsMeasured(
            lines,
            await _lines(client),
            objectives,
            worker,
            tuple(answered),
            tuple(agents),
            lag_s,
            time.monotonic() - started,
        )


async def _warm_up(run: LiveSteps, cluster: LiveCluster, key: ModelKey) -> None:
    """Has the agent work for a while: lines measured at loading ignore the other processes."""
    prompt, answer = round(run.prompt.mean), round(run.answer.mean)
    requests = tuple(Asked(_APART_S * n, 0, prompt, answer) for n in range(_WARM_UP_REQUESTS))
    await _load(run, cluster, key, TokenObjectives(), requests)
    await asyncio.sleep(_REPORTED_S)


async def _load(
    run: LiveSteps,
    cluster: LiveCluster,
    key: ModelKey,
    objectives: TokenObjectives,
    asked: Sequence[Asked],
) -> tuple[list[Answered], float]:
    """Returns the outcomes of requests, and how late they were sent; prompts are random tokens."""
    words = range(1, ModelRepository(cluster.model_repository).decoder_table(key).vocabulary_size)
    chosen = random.Random(run.seed)
    prompts = [chosen.choices(words, k=each.prompt_tokens) for each in asked]
    most_ns = (objectives.first_token_ns, objectives.per_token_ns)
    send = Steps(run.model, most_ns, asked, prompts).send
    moments = [each.due_s for each in asked]
    return await run_load(cluster.target, moments, send, cluster.options.data_dir)


def _cluster(run: LiveSteps, folder: Path) -> LiveCluster:
    return LiveCluster(
        ClusterOptions(agents=1, max_agents=run.most_agents, models=(run.model,)),
        folder,
        REAL,
        {"chain_policy": "slo", "chain_agents": 1, **run.scheduler},
    )


async def _hold_to(
    client: catenary.AsyncClient,
    repository: ModelRepository,
    key: ModelKey,
    objectives: TokenObjectives,
) -> None:
    """Gives the model its objectives; returns when the plan in force has them."""
    repository.write_manifest(replace(repository.manifest(key), objectives=objectives))
    await client.deploy(key.name)
    wanted = next(iter(objectives.named()))

    async def has_them() -> bool:
        return wanted in str((await client.plan()).document)

    await until(has_them, "the model's objectives are in force", _KNOWN_S)


async def _lines(client: catenary.AsyncClient) -> LatencyLines:
    """Returns the latency lines of the model's first chain."""
    found: list[LatencyLines] = []

    async def known() -> bool:
        chains = [chain for model in (await client.status()).models for chain in model.chains]
        found.extend(_read(chain.lines) for chain in chains if chain.lines is not None)
        return bool(found)

    await until(known, "the model's latency lines are known", _KNOWN_S)
    return found[0]


def _read(info: LatencyInfo) -> LatencyLines:
    return LatencyLines(
        info.prefill_token_ns,
        info.prefill_ns,
        info.decode_context_token_ns,
        info.decode_session_ns,
        info.decode_ns,
        info.decode_lone_ns,
        info.prefill_floor_ns,
    )


@asynccontextmanager
async def _watched(client: catenary.AsyncClient) -> AsyncIterator[list[AgentsAt]]:
    """Records the number of agents for as long as the context is open."""
    seen: list[AgentsAt] = []
    started = time.monotonic()

    async def watch() -> None:
        while True:
            with contextlib.suppress(catenary.CatenaryError):  # asked again in a moment
                states = [agent.state for agent in (await client.status()).agents]
                now = AgentsAt(
                    time.monotonic() - started,
                    states.count("ready"),
                    states.count("ready") + states.count("draining"),
                )
                if not seen or (seen[-1].ready, seen[-1].present) != (now.ready, now.present):
                    seen.append(now)
            await asyncio.sleep(_POLL_S)

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _settled(agents: list[AgentsAt], settle_s: float) -> None:
    """Waits until one agent is left, but not longer than allowed."""

    async def one_is_left() -> bool:
        return bool(agents) and agents[-1].present <= 1

    await within(settle_s, one_is_left)
