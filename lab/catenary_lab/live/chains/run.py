"""Server chains on real processes: the same chains and sessions as in the simulator.

One cluster per run: an agent per server, the gateway, the scheduler and Redis. The processes run
the cluster dilated; what is measured is divided by the dilation again.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from catenary_lab.live.chains.emulation import KEY, Emulation, plan_document
from catenary_lab.live.chains.load import Asked, ChainsOrder, ChainsOutcome, run_load
from catenary_lab.live.cluster import EMULATED, LiveCluster, serving, settings
from catenary_scheduler.planning.chains import Composition
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from catenary_simulator.chains.result import ChainResult
from catenary_simulator.chains.workload import SessionWorkload
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster

_TIMEOUT_S = 900.0
Progress = Callable[[str], None]


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
    sessions = asked_of(run.workload, run.emulation)
    async with _running(run, folder, progress) as cluster:
        local = cluster.cluster
        target = f"127.0.0.1:{local.grpc_port}"
        order = ChainsOrder(target, local.admin_target, KEY.name, _TIMEOUT_S, sessions)
        before, started = cluster.cpu_seconds(), time.monotonic()
        outcome = await run_load(order, folder)
        wall_s = time.monotonic() - started
        cores = (cluster.cpu_seconds() - before) / wall_s
        return _measured(outcome, run.emulation.dilation, (cluster.processes, cores, wall_s))


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


@asynccontextmanager
async def _running(run: ChainsRun, folder: Path, progress: Progress) -> AsyncIterator[LiveCluster]:
    emulation = run.emulation
    emulation.write_model(ModelRepository(folder / "models"))
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(plan_document(run.composition, emulation.session_tokens)))
    model = emulation.cluster.model
    scheduler: dict[str, Any] = {
        "chain_policy": run.policy,
        # Chains are ranked by the mean session the composition was made for.
        "expected_prompt_tokens": model.input_tokens,
        "expected_output_tokens": model.output_tokens,
    }
    cluster = LocalCluster(
        ClusterOptions(
            agents=len(emulation.cluster.servers),
            device="emulated:any",
            models=(KEY.name,),
            plan_file=plan_file,
            grpc_port=0,
            http_port=0,
            data_dir=folder,
            extra=settings(EMULATED, scheduler),
            each_agent=emulation.write_agents(folder / "profiles"),
        )
    )
    async with serving(cluster, progress):
        yield LiveCluster(cluster, {}, folder)


def _measured(
    outcome: ChainsOutcome, dilation: float, used: tuple[int, float, float]
) -> ChainsMeasured:
    complete = [each for each in outcome.sessions if not each.problem]
    waits = np.array([each.wait_s for each in complete]) / dilation
    responses = np.array([each.response_s for each in complete]) / dilation
    return ChainsMeasured(
        ChainResult(waits, responses - waits, rejected=outcome.lost),
        outcome.lost,
        tuple(sorted({each.problem for each in outcome.sessions if each.problem})),
        sum(each.starts > 1 for each in outcome.sessions),
        outcome.left_reservations,
        outcome.left_sessions,
        used[0],
        used[1],
        outcome.send_lag_p99_s,
        used[2],
    )
