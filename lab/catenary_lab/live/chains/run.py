"""Server chains on real processes: the same chains and sessions as in the simulator.

One cluster per run: an agent per server, the gateway, the scheduler and Redis. The processes run
the cluster dilated; what is measured is divided by the dilation again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import catenary
from catenary_lab.live.chains.emulation import KEY, Emulation, plan_document
from catenary_lab.live.chains.load import Answered, Asked, Sessions, request_id
from catenary_lab.live.cluster import EMULATED, LiveCluster, Progress
from catenary_lab.live.generator import run_load
from catenary_scheduler.planning.chains import Composition
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from catenary_simulator.chains.result import ChainResult
from catenary_simulator.chains.workload import SessionWorkload
from catenaryd.local.local_cluster import ClusterOptions

_SETTLE_S = 10.0
_POLL_S = 0.1
_QUEUE = "gateway.queue"


@dataclass(frozen=True, slots=True)
class ChainsRun:
    """A run of server chains: the workload, the chains, and their emulation."""

    emulation: Emulation
    composition: Composition
    workload: SessionWorkload
    policy: str


@dataclass(frozen=True, slots=True)
class ChainsMeasured:
    """The figures of a run, with the dilation taken out."""

    result: ChainResult
    lost: int
    problems: tuple[str, ...]
    moved: int
    """Number of sessions that were started more than once."""
    left_reservations: int
    left_sessions: int
    processes: int
    cpu_cores: float
    """CPU cores that all processes of the cluster used on average, without the load generator."""
    send_lag_p99_s: float
    """Delay of sending by the generator, 99th percentile, in seconds on the wall clock."""
    wall_s: float


async def run_live(run: ChainsRun, folder: Path, progress: Progress) -> ChainsMeasured:
    """Returns what real processes make of a workload.

    Raises:
        InvalidInput: A session has more tokens than `Emulation.session_tokens`, or a size.
        Unavailable: The cluster was not ready in time.
    """
    asked = asked_of(run.workload, run.emulation)
    moments, send = [each.due_s for each in asked], Sessions(asked).send
    async with _cluster(run, folder).serving(progress) as cluster, cluster.client() as client:
        before, started = cluster.cpu_seconds(), time.monotonic()
        answered, lag_s = await run_load(cluster.target, moments, send, folder)
        left = await _left(client)
        sessions = [await _traced(client, *each) for each in enumerate(answered)]
        wall_s = time.monotonic() - started
        cores = (cluster.cpu_seconds() - before) / wall_s
        return ChainsMeasured(
            *accounts_of(sessions, run.emulation.dilation),
            *left,
            cluster.processes,
            cores,
            lag_s,
            wall_s,
        )


def asked_of(workload: SessionWorkload, emulation: Emulation) -> tuple[Asked, ...]:
    """Returns the sessions of a workload at their dilated moments."""
    if any(size != 1.0 for size in workload.sizes):
        raise InvalidInput("workloads", "live runs need the tokens of a trace")
    sessions = tuple(
        Asked(
            arrived / NANOSECONDS_PER_SECOND * emulation.dilation,
            max(1, round(inputs)),
            max(1, round(outputs)),
        )
        for arrived, inputs, outputs in zip(
            workload.arrived_ns, workload.inputs, workload.outputs, strict=True
        )
    )
    longest = max(each.input_tokens + each.output_tokens for each in sessions)
    if longest > emulation.session_tokens:
        raise InvalidInput("live.session_tokens", f"a session of the trace has {longest} tokens")
    return sessions


def _cluster(run: ChainsRun, folder: Path) -> LiveCluster:
    emulation = run.emulation
    emulation.write_model(ModelRepository(folder / "models"))
    agents = emulation.write_agents(folder / "profiles")
    model = emulation.cluster.model
    return LiveCluster(
        ClusterOptions(len(agents), device="emulated:any", models=(KEY.name,), each_agent=agents),
        folder,
        EMULATED,
        {
            "chain_policy": run.policy,
            # Chains are ranked by the mean session the composition was made for.
            "expected_prompt_tokens": model.input_tokens,
            "expected_output_tokens": model.output_tokens,
        },
        plan_document(run.composition, emulation.session_tokens),
    )


async def _left(client: catenary.AsyncClient) -> tuple[int, int]:
    """Returns how many reservations and sessions are not given back within a while."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        status = await client.status()
        left = status.live_reservations, status.sessions_in_flight
        if left == (0, 0) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(_POLL_S)


async def _traced(client: catenary.AsyncClient, number: int, answered: Answered) -> Answered:
    """Returns an outcome with the time that the session waited, which the gateway knows."""
    try:
        trace = await client.trace(request_id(number))
    except catenary.CatenaryError as error:
        return replace(answered, problem=answered.problem or f"no trace: {error.reason}")
    queues = [span for span in trace.spans if span.name == _QUEUE]
    ended_ns = max((span.start_ns + span.duration_ns for span in queues), default=0)
    return replace(answered, wait_s=ended_ns / NANOSECONDS_PER_SECOND, starts=len(queues))


def accounts_of(
    sessions: Sequence[Answered], dilation: float
) -> tuple[ChainResult, int, tuple[str, ...], int]:
    """Returns the first fields of `ChainsMeasured`, from the outcomes of all sessions."""
    complete = [each for each in sessions if not each.problem]
    waits = np.array([each.wait_s for each in complete]) / dilation
    responses = np.array([each.response_s for each in complete]) / dilation
    lost = len(sessions) - len(complete)
    return (
        ChainResult(waits, responses - waits, rejected=lost),
        lost,
        tuple(sorted({each.problem for each in sessions if each.problem})),
        sum(each.starts > 1 for each in sessions),
    )
