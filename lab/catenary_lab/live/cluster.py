"""The processes of a live scenario, and what they make of a load."""

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
"""Simulations have no gateway in front that refuses what might be late."""
EMULATED = {"heartbeat_s": 2.0, "silence_s": 20.0}
"""A dozen processes and more on two cores must not take each other for dead."""
REAL = {"heartbeat_s": 1.0, "silence_s": 15.0}
"""The same where agents have a real model, and there are fewer of them."""

ClusterT = TypeVar("ClusterT", bound=LocalCluster)


def settings(
    patience: Mapping[str, float], scheduler: Mapping[str, Any], **agent: Any
) -> dict[str, dict[str, Any]]:
    """Returns what processes of a live run are told beyond the usual, by their role."""
    return {
        "gateway": dict(AS_SIMULATED),
        "agent": {**patience, **agent},
        "scheduler": {**patience, **scheduler},
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
        """How many there are, Redis included."""
        return len(self.cluster.children) + 1

    async def serve(self, moments: Moments, reply_allowance_ms: float) -> LoadOutcome:
        """Returns what becomes of requests that arrive at these moments.

        Args:
            moments: Per model.
            reply_allowance_ms: Clients ask for their result so much before they need it.
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
        problem: What the plan was made for, dilated as the plan is.
        agents: Every virtual GPU, a process each.
        plan: Who hosts what.
        folder: For models, logs and Redis data.
        scheduler: Its settings beyond the usual.
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
