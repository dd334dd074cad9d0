"""A placement run: equal simulated workers, filled by the scheduler's own dispatcher."""

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
from catenary_simulator.kernel import NEVER
from catenary_simulator.placement.engine import SimulatedWorker
from catenary_simulator.placement.learned import trained
from catenary_simulator.placement.loop import PlacementLoop, ReportDelays
from catenary_simulator.placement.result import PlacementResult, result_of
from catenary_simulator.placement.workload import LengthPopulation, RequestWorkload

MODEL = ModelKey("simulated", "1")
_SLOTS = 1 << 20
"""Slots of a worker: without a limit in effect, because the cache is counted in tokens here."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """The kind of all workers of a run.

    Attributes:
        lines: The latency lines of passes and steps.
        cache_tokens: Capacity of the cache, M.
        split_decode: Whether sessions come with their first token from elsewhere (split phase).
        believed: The lines that the dispatcher is told if it is to be wrong; None: `lines`.
    """

    lines: LatencyLines
    cache_tokens: float
    split_decode: bool = False
    believed: LatencyLines | None = None


@dataclass(frozen=True, slots=True)
class PlacementRun:
    """The settings of one run.

    Attributes:
        kind: Kind of the workers.
        workers: Number of workers.
        policy: A name of the scheduler's policies, or a policy factory.
        objectives: The objectives of all requests.
        learned: Lengths that the predictor has learned before; None: none.
        delays: Delays and intervals of messages.
        may_miss: The run ends early when more requests than this have missed; None: it never does.
        stopwatch: Clock in nanoseconds to time every decision with; None: they are not timed.
        tells_beginnings: Whether the dispatcher is told how prompts begin; False to compare.
        checked: True if all invariants of the dispatcher are checked after every event, for tests.
    """

    kind: WorkerKind
    workers: int
    policy: str | PolicyFactory
    objectives: TokenObjectives
    learned: LengthPopulation | None = None
    delays: ReportDelays = field(default_factory=ReportDelays)
    may_miss: int | None = None
    stopwatch: Callable[[], Nanoseconds] | None = None
    tells_beginnings: bool = True
    checked: bool = False


def serve_placement(run: PlacementRun, workload: RequestWorkload) -> PlacementResult:
    """Runs a workload from an empty cluster until all is answered, and returns its figures."""
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
    loop.tells_beginnings = run.tells_beginnings
    if run.may_miss is not None:
        loop.may_miss = run.may_miss
    loop.run()
    return result_of(loop, dispatcher.take_decision_times(), dispatcher.statistics())


def dispatcher_for(run: PlacementRun, requests: int) -> ChainedDispatcher:
    """Returns the dispatcher of a run without agents, its predictor trained on `run.learned`."""
    # Simulated workers cannot move sessions: one that leaves waits for its sessions to end.
    limits = ChainedConfig(
        max_queued=requests + 1, max_requests=requests + 1, max_moves=0, checked=run.checked
    )
    dispatcher = ChainedDispatcher(limits, policy=run.policy, stopwatch=run.stopwatch)
    if run.learned is not None:
        dispatcher.restore_lengths(MODEL, trained(run.learned))
    return dispatcher


def agent_of(name: str) -> Agent:
    return Agent(AgentId(name), "simulated", ServerId(name), 1, link_bytes_per_second=1)


def plan_of(run: PlacementRun, names: list[str]) -> Plan:
    """Returns the plan in which every named agent is a worker with a chain of its own."""
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
    served = ModelPlan(MODEL, NEVER, (), chains=chains, caches=caches, objectives=run.objectives)
    return Plan(PlanId("simulated"), (served,))
