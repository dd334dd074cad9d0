"""Plans of few unlike devices on real processes: the same load under one after the other.

The agents are emulated from their data sheets. The cluster makes its plan as one that nobody has
told anything, and is measured; then plans that somebody could have made by hand are put in force,
one after the other, while the load goes on. Those that serve most in a short time are measured
again for longer, and the cluster's own again beside them, so that none of them has won by chance.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import catenary
from catenary_lab.live.cluster import BUSY_SECONDS, EMULATED, LiveCluster, Progress
from catenary_lab.live.models import install
from catenary_lab.live.plans.by_hand import (
    EVEN,
    Pools,
    documents_by_hand,
    even_document,
    pools_of,
)
from catenary_lab.scenarios.pools.schema import LivePlans
from catenary_scheduler.planning import DeployedModel
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND
from catenary_services.errors import Unavailable
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions, free_port

DEFAULT = "default"
_TIMEOUT_S = 60.0
_APART_S = 0.1
"""Seconds until somebody whose request was refused asks again."""
_WINDOWS = 5
"""A window in which the plan in force changed is measured again, so often at most."""


@dataclass(frozen=True, slots=True)
class PlanMeasured:
    """The figures of one plan over one window."""

    name: str
    """`DEFAULT`, `EVEN`, or the plan in words."""
    seconds: float
    answers: int
    """Number of requests that were answered within their SLO."""
    late: int
    refused: int
    median_ms: float
    busy: Mapping[str, float]
    """Share of the window in which an agent of a class computed, mean over the agents."""
    cpu_cores: float
    """CPU cores that all processes of the cluster used on average."""

    @property
    def answers_per_s(self) -> float:
        """Requests answered within their SLO per second."""
        return self.answers / self.seconds


@dataclass(frozen=True, slots=True)
class PlansMeasured:
    """The figures of a run: every plan made by hand for a short time, the best of them for long."""

    screened: tuple[PlanMeasured, ...]
    measured: tuple[PlanMeasured, ...]
    explanation: str
    """The cluster's own plan, in its own words."""
    processes: int
    wall_s: float


@dataclass(slots=True)
class _Answers:
    """The ends of requests, in their order."""

    latencies_ms: list[float] = field(default_factory=list)
    refused: int = 0


async def run_live(run: LivePlans, folder: Path, progress: Progress) -> PlansMeasured:
    """Returns what real processes make of the plans of a scenario.

    Raises:
        Unavailable: The cluster was not ready in time, or its plan does not stay.
    """
    started = time.monotonic()
    progress(f"preparing {run.model}")
    slo_ns = round(run.slo_ms * NANOSECONDS_PER_MILLISECOND)
    root = folder / "models"
    key = await asyncio.to_thread(install, run.model, root, slo_ns=slo_ns, max_batch=run.max_batch)
    table = ModelRepository(root).block_table(key)
    model = DeployedModel(key, table, slo_ns, run.max_batch, float16_boundaries=True)
    pools = pools_of(run.gpus)
    by_hand = documents_by_hand(model, pools)
    async with (
        _cluster(run, pools, folder).serving(progress) as cluster,
        cluster.client(_TIMEOUT_S) as client,
    ):
        async with _asked(run, client) as ended:
            window = _Windows(run, cluster, client, ended, progress)
            await asyncio.sleep(run.warm_up_s)
            own = await window.measured(DEFAULT, run.screening_s)
            explanation = (await client.plan()).explanation
            screened = [await window.under(*each, run.screening_s) for each in by_hand.items()]
            ranked = sorted(screened, key=lambda each: -each.answers_per_s)[: run.finalists]
            measured = [await window.under(EVEN, even_document(model, pools), run.measured_s)]
            for _ in range(run.rounds):
                for each in ranked:
                    document = by_hand[each.name]
                    measured.append(await window.under(each.name, document, run.measured_s))
                await client.replan()
                measured.append(await window.measured(DEFAULT, run.measured_s))
        return PlansMeasured(
            (own, *screened),
            tuple(measured),
            explanation,
            cluster.processes,
            time.monotonic() - started,
        )


def _cluster(run: LivePlans, pools: Pools, folder: Path) -> LiveCluster:
    agents = tuple(
        {
            "agent_id": agent,
            "device": f"emulated:{name}",
            "device_class": name,
            "emulated_slowdown": run.slowdown,
            "metrics_port": free_port(),
            "threads": 1,
        }
        for name, own in pools.items()
        for agent in own
    )
    options = ClusterOptions(
        len(agents), device="emulated:any", models=(run.model,), each_agent=agents
    )
    return LiveCluster(options, folder, EMULATED, {})


async def _busy_s(cluster: LiveCluster) -> dict[str, float]:
    """Returns for how long the agents of each class have computed so far, their mean."""
    by_class = defaultdict[str, list[float]](list)
    counted = await cluster.counted(BUSY_SECONDS)
    for agent, seconds in zip(cluster.options.each_agent, counted, strict=True):
        by_class[agent["device_class"]].append(seconds)
    return {name: statistics.fmean(each) for name, each in by_class.items()}


@asynccontextmanager
async def _asked(run: LivePlans, client: catenary.AsyncClient) -> AsyncIterator[_Answers]:
    """Asks for answers, always as many at a time, for as long as the context is open."""
    spec = (await client.model_metadata(run.model)).inputs[0]
    row = np.zeros((1, *spec.shape[1:]), np.float32)
    request = catenary.InferRequest(run.model, {spec.name: row})
    ended = _Answers()

    async def ask() -> None:
        while True:
            began = time.monotonic()
            try:
                await client.send(request)
                ended.latencies_ms.append(1e3 * (time.monotonic() - began))
            except catenary.CatenaryError:
                ended.refused += 1
                await asyncio.sleep(_APART_S)

    asking = [asyncio.create_task(ask()) for _ in range(run.at_once)]
    try:
        yield ended
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Windows:
    """Measures plans of one cluster under one load."""

    run: LivePlans
    cluster: LiveCluster
    client: catenary.AsyncClient
    ended: _Answers
    progress: Progress

    async def under(
        self, name: str, document: Mapping[str, object], seconds: float
    ) -> PlanMeasured:
        """Puts a plan in force and returns its figures."""
        await self.client.apply_plan(document)
        return await self.measured(name, seconds)

    async def measured(self, name: str, seconds: float) -> PlanMeasured:
        """Returns the figures of a window in which the plan in force stayed the same."""
        for _ in range(_WINDOWS):
            await asyncio.sleep(self.run.settle_s)
            plan = (await self.client.plan()).plan_id
            found = await self._window(name, seconds)
            if (await self.client.plan()).plan_id == plan:
                self.progress(f"{name}: {found.answers_per_s:.1f} requests/s")
                return found
        raise Unavailable(f"the plan changed in each of {_WINDOWS} windows")

    async def _window(self, name: str, seconds: float) -> PlanMeasured:
        cpu_s, busy_s = self.cluster.cpu_seconds(), await _busy_s(self.cluster)
        first, refused, began = len(self.ended.latencies_ms), self.ended.refused, time.monotonic()
        await asyncio.sleep(seconds)
        wall_s = time.monotonic() - began
        latencies: Sequence[float] = self.ended.latencies_ms[first:]
        refused = self.ended.refused - refused
        busy = await _busy_s(self.cluster)
        over_s = time.monotonic() - began
        in_time = sum(each <= self.run.slo_ms for each in latencies)
        return PlanMeasured(
            name,
            wall_s,
            in_time,
            len(latencies) - in_time,
            refused,
            float(np.median(latencies)) if latencies else 0.0,
            {each: (busy[each] - busy_s[each]) / over_s for each in busy},
            (self.cluster.cpu_seconds() - cpu_s) / over_s,
        )
