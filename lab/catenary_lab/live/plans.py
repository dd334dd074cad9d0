"""Plans of few unlike devices on real processes: the same load under one after the other.

The agents are emulated from their data sheets. The cluster makes its plan as one that nobody has
told anything, and is measured; then plans that somebody could have made by hand are put in force,
one after the other, while the load goes on. Those that serve most in a short time are measured
again for longer, and the cluster's own again beside them, so that none of them has won by chance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import catenary
from catenary_lab.live.agent_metrics import BUSY_SECONDS, counter_at
from catenary_lab.live.cluster import EMULATED, LiveCluster
from catenary_lab.live.models import install
from catenary_lab.scenarios.pools.schema import LivePlans
from catenary_scheduler.planning import DeployedModel, even_split
from catenary_scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
    placement_document,
)
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    AgentId,
    ModelKey,
    ServerId,
)
from catenary_services.domain.model import BlockTable
from catenary_services.domain.plan import Agent
from catenary_services.errors import Unavailable
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions, free_port

DEFAULT, EVEN, WHOLE = "default", "even split", "whole models"
_TIMEOUT_S = 60.0
_APART_S = 0.1
"""Seconds until somebody whose request was refused asks again."""
_WINDOWS = 5
"""A window in which the plan in force changed is measured again, so often at most."""
_LINK_BYTES_PER_S = 2_000_000_000
Progress = Callable[[str], None]
Pools = Mapping[str, tuple[AgentId, ...]]
"""Agents by the class of their device."""


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
    key = await asyncio.to_thread(
        install,
        run.model,
        folder / "models",
        slo_ns=round(run.slo_ms * NANOSECONDS_PER_MILLISECOND),
        max_batch=run.max_batch,
    )
    table = ModelRepository(folder / "models").block_table(key)
    pools = pools_of(run.gpus)
    by_hand = {name: _document(run, key, each) for name, each in plans_by_hand(pools, table.blocks)}
    split = even_document(run, key, table, pools)
    cluster = _Cluster(run, pools, folder)
    async with cluster.serving(progress), cluster.client(_TIMEOUT_S) as client:
        async with _asked(run, client) as ended:
            window = _Windows(run, cluster, client, ended, progress)
            await asyncio.sleep(run.warm_up_s)
            own = await window.measured(DEFAULT, run.screening_s)
            explanation = (await client.plan()).explanation
            screened = [await window.under(*each, run.screening_s) for each in by_hand.items()]
            ranked = sorted(screened, key=lambda each: -each.answers_per_s)[: run.finalists]
            measured = [await window.under(EVEN, split, run.measured_s)]
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


def pools_of(gpus: Mapping[str, int]) -> dict[str, tuple[AgentId, ...]]:
    """Returns the agents of each class, whose numbers go on from class to class."""
    pools, first = {}, 0
    for name, count in gpus.items():
        pools[name] = tuple(AgentId(f"agent-{first + at}") for at in range(count))
        first += count
    return pools


def plans_by_hand(
    pools: Pools, blocks: int
) -> Iterator[tuple[str, tuple[tuple[StagePlacement, ...], ...]]]:
    """Yields the pipelines of each plan that keeps devices of a class together, with its name.

    The whole model is on every device, or it is cut in two at any block, and either class has the
    first part.
    """
    yield WHOLE, tuple((StagePlacement(0, blocks, agents),) for agents in pools.values())
    for first, second in ((a, b) for a in pools for b in pools if a != b):
        for cut in range(1, blocks):
            stages = (
                StagePlacement(0, cut, pools[first]),
                StagePlacement(cut, blocks, pools[second]),
            )
            yield f"{first} [0, {cut}), {second} [{cut}, {blocks})", (stages,)


def even_document(
    run: LivePlans, key: ModelKey, table: BlockTable, pools: Pools
) -> dict[str, object]:
    """Returns the even split, which knows neither the speed nor the memory of the agents."""
    agents = [
        Agent(agent, name, ServerId(agent), 0, _LINK_BYTES_PER_S)
        for name, own in pools.items()
        for agent in own
    ]
    slo_ns = round(run.slo_ms * NANOSECONDS_PER_MILLISECOND)
    model = DeployedModel(key, table, slo_ns, run.max_batch, True)
    return placement_document(even_split([model], agents))


def _document(
    run: LivePlans, key: ModelKey, pipelines: tuple[tuple[StagePlacement, ...], ...]
) -> dict[str, object]:
    made = tuple(PipelinePlacement(run.max_batch, stages) for stages in pipelines)
    slo_ns = round(run.slo_ms * NANOSECONDS_PER_MILLISECOND)
    return placement_document(Placement((ModelPlacement(key, slo_ns, True, made),)))


class _Cluster(LiveCluster):
    """A cluster of emulated agents that show their metrics."""

    def __init__(self, run: LivePlans, pools: Pools, folder: Path) -> None:
        self._pools = pools
        self._ports = {agent: free_port() for agents in pools.values() for agent in agents}
        agents = tuple(
            {
                "agent_id": agent,
                "device": f"emulated:{name}",
                "device_class": name,
                "emulated_slowdown": run.slowdown,
                "metrics_port": self._ports[agent],
                "threads": 1,
            }
            for name, own in pools.items()
            for agent in own
        )
        options = ClusterOptions(
            len(agents), device="emulated:any", models=(run.model,), each_agent=agents
        )
        super().__init__(options, folder, EMULATED, {})

    async def busy_s(self) -> dict[str, float]:
        """Returns for how long the agents of each class have computed so far, their mean."""
        return {
            name: sum([await counter_at(self._ports[agent], BUSY_SECONDS) for agent in agents])
            / len(agents)
            for name, agents in self._pools.items()
        }


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
    cluster: _Cluster
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
        cpu_s, busy_s = self.cluster.cpu_seconds(), await self.cluster.busy_s()
        first, refused, began = len(self.ended.latencies_ms), self.ended.refused, time.monotonic()
        await asyncio.sleep(seconds)
        wall_s = time.monotonic() - began
        latencies: Sequence[float] = self.ended.latencies_ms[first:]
        refused = self.ended.refused - refused
        busy = await self.cluster.busy_s()
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
