"""The processes of a live scenario, and the load that they serve."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from catenary_lab.live.emulation import agent_settings, plan_document, write_models, write_profiles
from catenary_lab.live.load import LoadOrder, LoadOutcome, Moments, run_load
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_services.domain.plan import Agent, Plan
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster

AS_SIMULATED = {"fair_share": False}
"""Gateway settings as in simulations, which have no gateway that refuses requests that may be
late."""
EMULATED = {"heartbeat_s": 2.0, "silence_s": 20.0}
"""Timeouts of clusters with many emulated agents: a dozen processes and more on two cores must not
take each other for dead."""
REAL = {"heartbeat_s": 1.0, "silence_s": 15.0}
"""Timeouts of clusters whose agents have a real model, of which there are fewer."""

ClusterT = TypeVar("ClusterT", bound=LocalCluster)


def settings(
    timeouts: Mapping[str, float], scheduler: Mapping[str, Any], **agent: Any
) -> dict[str, dict[str, Any]]:
    """Returns the settings of processes of a live run, beyond the usual ones, by their role."""
    return {
        "gateway": dict(AS_SIMULATED),
        "agent": {**timeouts, **agent},
        "scheduler": {**timeouts, **scheduler},
    }


@asynccontextmanager
async def serving(cluster: ClusterT, progress: Callable[[str], None]) -> AsyncIterator[ClusterT]:
    """Starts a cluster and stops it at the end."""
    try:
        await cluster.start(progress)
        yield cluster
    finally:
        await cluster.stop()


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """Running processes that serve the plan."""

    cluster: LocalCluster
    slo_ms: Mapping[str, float]
    folder: Path

    @property
    def processes(self) -> int:
        """Number of processes, Redis included."""
        return len(self.cluster.children) + 1

    async def serve(self, moments: Moments, reply_allowance_ms: float) -> LoadOutcome:
        """Returns the outcome of requests that arrive at the given times.

        Args:
            moments: Arrival times by model.
            reply_allowance_ms: Time by which clients ask for their result before they need it.
        """
        target = f"127.0.0.1:{self.cluster.grpc_port}"
        order = LoadOrder(target, dict(self.slo_ms), reply_allowance_ms, moments)
        return await run_load(order, self.folder)

    def cpu_seconds(self) -> float:
        """Returns the CPU time all processes have used so far, without Redis."""
        total = 0.0
        for child in self.cluster.children.values():
            with contextlib.suppress(psutil.Error):
                if child.pid is not None:
                    times = psutil.Process(child.pid).cpu_times()
                    total += times.user + times.system
        return total


@asynccontextmanager
async def running(
    problem: PoolingProblem,
    agents: tuple[Agent, ...],
    plan: Plan,
    folder: Path,
    *,
    scheduler: Mapping[str, Any],
    progress: Callable[[str], None] = lambda _line: None,
) -> AsyncIterator[LiveCluster]:
    """Runs a cluster of emulated agents that serves a plan.

    Args:
        problem: The problem that the plan was made for, dilated as the plan is.
        agents: The agents, one process for every virtual GPU.
        plan: The plan, which says which agent hosts what.
        folder: Folder for models, logs and Redis data.
        scheduler: Settings of the scheduler beyond the usual ones.
        progress: Told what is being waited for.
    """
    repository = ModelRepository(folder / "models")
    write_models(repository, problem)
    profiles = write_profiles(folder / "profiles", problem)
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(plan_document(plan)))
    cluster = LocalCluster(
        ClusterOptions(
            agents=len(agents),
            device="emulated:any",
            models=tuple(model.name for model in problem.models),
            plan_file=plan_file,
            grpc_port=0,
            http_port=0,
            data_dir=folder,
            extra=settings(EMULATED, scheduler),
            each_agent=agent_settings(agents, profiles),
        )
    )
    slo_ms = {model.name: model.slo_us / 1e3 for model in problem.models}
    async with serving(cluster, progress):
        yield LiveCluster(cluster, slo_ms, folder)
