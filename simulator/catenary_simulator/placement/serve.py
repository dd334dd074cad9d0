"""Equal workers in the simulator, filled by the scheduler's own dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.chained.queues.wait_queue import PolicyFactory
from catenary_scheduler.dispatch.events import AgentJoined, PlanActivated
from catenary_services.domain.ids import (
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    PlanId,
    ServerId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import (
    Agent,
    CacheCapacity,
    Chain,
    ChainHop,
    ChainRole,
    ModelPlan,
    Plan,
)
from catenary_simulator.placement.engine import SimulatedWorker
from catenary_simulator.placement.learned import trained
from catenary_simulator.placement.loop import PlacementLoop, ReportDelays
from catenary_simulator.placement.result import PlacementResult, result_of
from catenary_simulator.placement.workload import LengthPopulation, RequestWorkload

MODEL = ModelKey("simulated", "1")
_NEVER: Nanoseconds = 1 << 60
_SLOTS = 1 << 20
"""Sessions at a time as far as slots go: the cache is counted in tokens here."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What all workers of a run are.

    Attributes:
        lines: How long passes and steps take.
        cache_tokens: Capacity of the cache, M.
        split_decode: Sessions come with their first token from elsewhere (split phase).
        believed: What the dispatcher is told instead of `lines`, if it is to be wrong.
    """

    lines: LatencyLines
    cache_tokens: float
    split_decode: bool = False
    believed: LatencyLines | None = None


@dataclass(frozen=True, slots=True)
class PlacementRun:
    """One run.

    Attributes:
        kind: Of the workers.
        workers: How many.
        policy: A name of the scheduler's, or what makes a policy.
        objectives: What requests are held to.
        learned: What answers were seen before; None: none.
        delays: How long news take.
        may_miss: Requests; the run ends when more have missed. None: it never does.
        stopwatch: Has every decision timed, in nanoseconds.
    """

    kind: WorkerKind
    workers: int
    policy: str | PolicyFactory
    objectives: TokenObjectives
    learned: LengthPopulation | None = None
    delays: ReportDelays = field(default_factory=ReportDelays)
    may_miss: int | None = None
    stopwatch: Callable[[], Nanoseconds] | None = None


def serve_placement(run: PlacementRun, workload: RequestWorkload) -> PlacementResult:
    """Returns how workers serve a workload, from an empty cluster until all is answered."""
    dispatcher = dispatcher_for(run, len(workload))
    names = [f"worker-{index}" for index in range(run.workers)]
    for name in names:
        dispatcher.handle(AgentJoined(agent_of(name)), 0)
    dispatcher.handle(PlanActivated(plan_of(run, names)), 0)
    kind = run.kind
    workers = {
        name: SimulatedWorker(index, kind.lines, kind.cache_tokens, kind.split_decode)
        for index, name in enumerate(names)
    }
    loop = PlacementLoop(dispatcher, MODEL, workload, workers, run.objectives, run.delays)
    loop.sweep = dispatcher.take_changes
    if run.may_miss is not None:
        loop.may_miss = run.may_miss
    loop.run()
    return result_of(loop, dispatcher.take_decision_times(), dispatcher.statistics())


def dispatcher_for(run: PlacementRun, requests: int) -> ChainedDispatcher:
    """Returns the dispatcher of a run, without agents."""
    # The workers here know nothing of moves: who leaves waits for the end of its sessions.
    limits = ChainedConfig(max_queued=requests + 1, max_requests=requests + 1, max_moves=0)
    dispatcher = ChainedDispatcher(limits, policy=run.policy, stopwatch=run.stopwatch)
    if run.learned is not None:
        dispatcher.restore_lengths(MODEL, trained(run.learned))
    return dispatcher


def agent_of(name: str) -> Agent:
    """Returns the agent of a worker."""
    return Agent(AgentId(name), "simulated", ServerId(name), 1, link_bytes_per_second=1)


def plan_of(run: PlacementRun, names: list[str]) -> Plan:
    """Returns the plan in which every agent is a worker."""
    part = PartitionKey(MODEL, 0, 1)
    role: ChainRole = "decode" if run.kind.split_decode else "mixed"
    chains = tuple(
        Chain(
            f"chain-{name}",
            (ChainHop(AgentId(name), part, 0, 1),),
            _SLOTS,
            1,
            role=role,
            lines=run.kind.believed or run.kind.lines,
            cache_tokens=run.kind.cache_tokens,
        )
        for name in names
    )
    caches = tuple(CacheCapacity(AgentId(name), part, _SLOTS) for name in names)
    served = ModelPlan(MODEL, _NEVER, (), chains=chains, caches=caches, objectives=run.objectives)
    return Plan(PlanId("simulated"), (served,))
