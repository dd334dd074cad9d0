"""Chats over unlike agents on real processes: the same chats and chains as in the simulator.

Each agent holds the whole model. It is emulated by the latency lines of its kind, dilated, so a
step takes the longer the more sessions it has. What is measured is divided by the dilation again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import catenary
from catenary_lab.live.chains.chats_load import AnsweredChat, ChatsLoad
from catenary_lab.live.chains.emulation import (
    BYTES_PER_GB,
    KEY,
    SLO_NS,
    WHOLE_PROMPT,
    write_decoder,
)
from catenary_lab.live.chains.load import Asked
from catenary_lab.live.cluster import BUSY_SECONDS, EMULATED, LiveCluster, Progress
from catenary_lab.live.generator import run_load
from catenary_lab.live.waiting import until
from catenary_lab.scenarios.chains.schema import Chats
from catenary_lab.scenarios.placement.schema_parts import WorkerSpec
from catenary_scheduler.planning.chain_placement import ChainPlacement, HopPlacement, hosts_for
from catenary_scheduler.planning.placement import ModelPlacement, Placement, placement_document
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    AgentId,
)
from catenary_services.models.model_repository import ModelRepository
from catenary_simulator.placement.workload import LengthPopulation, RequestWorkload
from catenaryd.local.local_cluster import ClusterOptions, free_port

_BLOCKS = 8
"""Blocks of the model, between which the times of a step are divided."""
_KNOWN_S = 60.0


@dataclass(frozen=True, slots=True)
class ChatsRun:
    """A run of chats by one policy."""

    scenario: Chats
    dilation: float
    policy: str
    named: bool
    """Whether requests name the objectives of the scenario."""
    work: RequestWorkload
    learned: LengthPopulation
    """Lengths that the scheduler expects; as many of them as `warm_up` are asked for first."""
    warm_up: int

    @property
    def agents(self) -> tuple[AgentId, ...]:
        """Names of the agents, by their kinds."""
        return tuple(AgentId(f"{kind}-{at}") for at, kind in enumerate(self.scenario.agents))


@dataclass(frozen=True, slots=True)
class ChatsMeasured:
    """The figures of a run, with the dilation taken out."""

    chats: tuple[AnsweredChat, ...]
    busy_s: tuple[float, ...]
    """Seconds that each agent computed."""
    seconds: float
    """Seconds from the start of the load to its last token."""
    processes: int
    cpu_cores: float
    """CPU cores that all processes of the cluster used on average, without the load generator."""
    send_lag_p99_s: float
    """Delay of sending by the generator, 99th percentile, in seconds on the wall clock."""


async def run_live(run: ChatsRun, folder: Path, progress: Progress) -> ChatsMeasured:
    """Returns what real processes make of chats.

    Raises:
        Unavailable: The cluster was not ready in time, or nothing was known of its chains in time.
    """
    async with _cluster(run, folder).serving(progress) as cluster, cluster.client() as client:
        await _known_lines(client, len(run.agents))
        await _send(run, cluster, first_chats(run))
        busy_s = await cluster.counted(BUSY_SECONDS)
        cpu_s, began = cluster.cpu_seconds(), time.monotonic()
        chats, lag_s = await _send(run, cluster, asked_of(run))
        seconds = time.monotonic() - began
        cores = (cluster.cpu_seconds() - cpu_s) / seconds
        after_s = await cluster.counted(BUSY_SECONDS)
        return ChatsMeasured(
            tuple(undilated(each, run.dilation) for each in chats),
            tuple((b - a) / run.dilation for a, b in zip(busy_s, after_s, strict=True)),
            seconds / run.dilation,
            cluster.processes,
            cores,
            lag_s,
        )


def asked_of(run: ChatsRun) -> list[Asked]:
    """Returns the chats of a run at their dilated moments."""
    work = run.work
    return [
        Asked(moment_ns / NANOSECONDS_PER_SECOND * run.dilation, prompt, answer)
        for moment_ns, prompt, answer in zip(
            work.arrived_ns, work.prompts, work.answers, strict=True
        )
    ]


def first_chats(run: ChatsRun) -> list[Asked]:
    """Returns the chats of the warm-up, at the rate of the others."""
    work = run.work
    apart_s = work.arrived_ns[-1] / NANOSECONDS_PER_SECOND / len(work) * run.dilation
    lengths = list(zip(run.learned.prompts, run.learned.answers, strict=True))[: run.warm_up]
    return [Asked(at * apart_s, *each) for at, each in enumerate(lengths)]


def undilated(chat: AnsweredChat, dilation: float) -> AnsweredChat:
    """Returns an outcome with the times that it would have without dilation."""
    times = (chat.response_s / dilation, chat.first_token_s / dilation)
    return AnsweredChat(chat.answer_tokens, *times, chat.problem)


async def _send(
    run: ChatsRun, cluster: LiveCluster, asked: Sequence[Asked]
) -> tuple[list[AnsweredChat], float]:
    objectives = run.scenario.objectives
    most_ms = (objectives.ttft_ms * run.dilation, objectives.atgt_ms * run.dilation)
    load = ChatsLoad(asked, most_ms if run.named else None)
    moments = [each.due_s for each in asked]
    return await run_load(cluster.target, moments, load.send, cluster.options.data_dir)


async def _known_lines(client: catenary.AsyncClient, chains: int) -> None:
    """Returns once the scheduler knows the latency lines of every chain."""

    async def known() -> bool:
        found = [chain for model in (await client.status()).models for chain in model.chains]
        return len(found) == chains and all(chain.lines is not None for chain in found)

    await until(known, f"the latency lines of {chains} chains are known", _KNOWN_S)


def _cluster(run: ChatsRun, folder: Path) -> LiveCluster:
    """Returns a cluster of emulated agents, each with a chain of its own."""
    scenario = run.scenario
    kinds = [scenario.workers[kind] for kind in scenario.agents]
    write_decoder(
        ModelRepository(folder / "models"),
        blocks=_BLOCKS,
        block_bytes=round(kinds[0].weights_gb * BYTES_PER_GB / _BLOCKS),
        cache_bytes_per_token=round(kinds[0].token_bytes / _BLOCKS),
        session_tokens=scenario.lengths.context_tokens,
    )
    agents = []
    for name, kind in zip(run.agents, kinds, strict=True):
        file = folder / f"{name}.json"
        file.write_text(json.dumps({KEY.name: times_of(kind, run.dilation)}))
        agents.append(
            {
                "agent_id": name,
                "device": f"emulated:{name}",
                "device_class": name,
                "emulated_profile": file,
                "memory_bytes": round(kind.gpus * kind.gpu_memory_gb * BYTES_PER_GB),
                "prefill_chunk_tokens": scenario.chunk_tokens or WHOLE_PROMPT,
                "metrics_port": free_port(),
                "threads": 1,
            }
        )
    return LiveCluster(
        ClusterOptions(
            len(agents), device="emulated:any", models=(KEY.name,), each_agent=tuple(agents)
        ),
        folder,
        EMULATED,
        {
            "chain_policy": run.policy,
            "expected_prompt_tokens": fmean(run.learned.prompts),
            "expected_output_tokens": fmean(run.learned.answers),
        },
        plan_document(run),
    )


def times_of(worker: WorkerSpec, dilation: float) -> dict[str, float]:
    """Returns a kind's entry in its file of emulated times, which are those of a block."""
    scale = NANOSECONDS_PER_MILLISECOND * dilation / _BLOCKS
    return {
        "prefill_ns": worker.prefill_ms * scale,
        "prefill_token_ns": worker.prefill_token_ms * scale,
        "decode_ns": worker.decode_ms * scale,
        "decode_session_ns": worker.decode_session_ms * scale,
        "decode_context_token_ns": worker.decode_context_token_ms * scale,
        "decode_lone_ns": worker.decode_lone_ms * scale,
    }


def plan_document(run: ChatsRun) -> dict[str, Any]:
    """Returns the chains, one on each agent, with as much cache as its memory has room for."""
    scenario = run.scenario
    session_tokens = scenario.lengths.context_tokens
    longest = scenario.slots * session_tokens
    chains = []
    for name, kind in zip(run.agents, scenario.agents, strict=True):
        room = int(scenario.workers[kind].cache_tokens)
        hop = HopPlacement(name, 0, _BLOCKS, 0)
        tokens = room if room < longest else 0
        chains.append(ChainPlacement(scenario.slots, (hop,), cache_tokens=tokens))
    placed = ModelPlacement(
        KEY,
        SLO_NS,
        False,
        (),
        chains=tuple(chains),
        hosts=hosts_for(chains, session_tokens),
        session_tokens=session_tokens,
    )
    return placement_document(Placement((placed,)))
