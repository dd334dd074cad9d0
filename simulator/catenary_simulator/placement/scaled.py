"""Runs whose number of workers follows the scheduler's own scaling, with cold starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from catenary_scheduler.dispatch.chained import ChainedDispatcher
from catenary_scheduler.dispatch.events import AgentJoined, AgentLost, Event, PlanActivated
from catenary_scheduler.scaling.workers.autoscaling import ModelScaling
from catenary_scheduler.scaling.workers.worker_statistics import ScalingPolicy, WorkerStatistics
from catenary_scheduler.scaling.workers.workers_line import SessionLengths as MeanLengths
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds
from catenary_simulator.placement.engine import PICOSECONDS, SimulatedSession, SimulatedWorker
from catenary_simulator.placement.loop import PlacementLoop
from catenary_simulator.placement.result import PlacementResult, result_of
from catenary_simulator.placement.serve import (
    MODEL,
    PlacementRun,
    agent_of,
    dispatcher_for,
    plan_of,
)
from catenary_simulator.placement.workload import RequestWorkload

_LOOK_NS = NANOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """The settings of a run whose workers are scaled.

    Attributes:
        run: The settings of the run, with the number of workers at the start.
        cold_start_ns: Time from the order of a worker until it serves.
        most: Most workers at the same time.
        lengths: Mean lengths of the requests, as a model's history gives them.
        policy: The scaling policy; its cold start is replaced by `cold_start_ns`.
    """

    run: PlacementRun
    cold_start_ns: Nanoseconds
    most: int
    lengths: MeanLengths
    policy: ScalingPolicy = field(default_factory=ScalingPolicy)


@dataclass(frozen=True, slots=True)
class ScaledResult:
    """Figures of a scaled run.

    Attributes:
        served: The figures of the requests.
        worker_s: Seconds of all workers, from their order to their end, until the last arrival.
        peak: Most workers at the same time, with those that start.
        orders: Number of changes of the number of workers.
    """

    served: PlacementResult
    worker_s: float
    peak: int
    orders: int


def serve_scaled(scaled: ScaledRun, workload: RequestWorkload) -> ScaledResult:
    """Runs a workload on a cluster that scales meanwhile, and returns its figures."""
    run = scaled.run
    dispatcher = dispatcher_for(run, len(workload))
    cluster = ScaledCluster(scaled, dispatcher)
    loop = PlacementLoop(dispatcher, MODEL, workload, {}, run.objectives, run.delays)
    loop.sweep = dispatcher.take_changes
    loop.controller = cluster
    for event in cluster.begin(loop):
        dispatcher.handle(event, 0)
    loop.run()
    last = workload.arrived_ns[-1] if len(workload) else 0
    result = result_of(loop, dispatcher.take_decision_times(), dispatcher.statistics())
    return ScaledResult(result, cluster.worker_s(last), cluster.peak, cluster.orders)


class ScaledCluster:
    """The cluster that carries out orders of the scaling; implements `RunController`.

    Args:
        scaled: The settings of the run.
        dispatcher: The dispatcher that places sessions.
    """

    every_ns: Nanoseconds = _LOOK_NS

    def __init__(self, scaled: ScaledRun, dispatcher: ChainedDispatcher) -> None:
        self._scaled = scaled
        self._dispatcher = dispatcher
        policy = replace(scaled.policy, cold_start_ns=scaled.cold_start_ns)
        self.scaling = ModelScaling(MODEL, policy)
        self._made = 0
        self._starting: list[tuple[Nanoseconds, str]] = []
        """The starting workers in order: the time at which each will serve, and its name."""
        self._serving: list[str] = []
        self._draining: list[str] = []
        self._since: dict[str, Nanoseconds] = {}
        """Time at which each present worker was ordered."""
        self._spans: list[tuple[Nanoseconds, Nanoseconds]] = []
        """Times of each worker that has gone: its order and its end."""
        self.orders = 0
        self.peak = 0

    def begin(self, loop: PlacementLoop) -> list[Event]:
        """Starts the first workers, and returns the events by which they serve."""
        for _ in range(self._scaled.run.workers):
            self._start(0)
        return self._begin_serving(loop, self._scaled.cold_start_ns, at=0)

    def arrived(self, session: SimulatedSession, now: Nanoseconds) -> None:
        """Tells the scaling that a request arrived."""
        self.scaling.arrived(session.prompt_tokens, now)

    def ended(self, session: SimulatedSession, now: Nanoseconds) -> None:
        """Tells the scaling the times of a session that ended."""
        first_ns = (session.first_ps - session.arrived_ps) // PICOSECONDS
        decode_ns = (session.last_ps - session.first_ps) // PICOSECONDS
        outcome = (session.answer_tokens, first_ns, decode_ns)
        arrived_ns = session.arrived_ps // PICOSECONDS
        self.scaling.finished(outcome, self._scaled.run.objectives, arrived_ns, now)

    def look(self, loop: PlacementLoop, now: Nanoseconds) -> list[Event]:
        """Lets started workers serve and empty ones go, and orders what the scaling wants."""
        events = self._begin_serving(loop, now, at=now)
        events += self._let_go(loop, now)
        scale = self.scaling.decide(self._facts(loop), now)
        if scale is None:
            return events
        self.orders += 1
        change = scale.workers - len(self._serving) - len(self._starting)
        for _ in range(change):
            self._start(now)
        if change < 0:
            events += self._retire(loop, -change, now)
        return events

    def worker_s(self, until: Nanoseconds) -> float:
        """Returns the summed seconds of all workers, from their orders to the time `until`."""
        spans = [*self._spans, *((since, until) for since in self._since.values())]
        total = sum(max(0, min(end, until) - min(since, until)) for since, end in spans)
        return total / NANOSECONDS_PER_SECOND

    def _facts(self, loop: PlacementLoop) -> WorkerStatistics:
        run, lengths = self._scaled.run, self._scaled.lengths
        tokens = lengths.prompt_tokens + lengths.answer_tokens
        slots = int(run.kind.cache_tokens / max(1.0, run.kind.lines.cache(tokens)))
        statistics = self._dispatcher.statistics()
        return WorkerStatistics(
            workers=len(self._serving),
            sessions=sum(loop.workers[name].sessions for name in self._serving),
            slots=slots * len(self._serving),
            queued=statistics["queued_requests"],
            forced=statistics.get("forced_placements", 0),
            lines=run.kind.lines,
            objectives=run.objectives,
            most=self._scaled.most,
            expected=lengths,
        )

    def _start(self, now: Nanoseconds) -> None:
        name = f"worker-{self._made}"
        self._made += 1
        self._starting.append((now + self._scaled.cold_start_ns, name))
        self._since[name] = now
        self.peak = max(self.peak, len(self._since))

    def _begin_serving(
        self, loop: PlacementLoop, ready: Nanoseconds, at: Nanoseconds
    ) -> list[Event]:
        names = [name for moment, name in self._starting if moment <= ready]
        if not names:
            return []
        self._starting = self._starting[len(names) :]
        kind = self._scaled.run.kind
        for name in names:
            index = len(loop.workers)
            loop.add_worker(
                name, SimulatedWorker(index, kind.lines, kind.cache_tokens, kind.split_decode)
            )
        self._serving += names
        return [*(AgentJoined(agent_of(name)) for name in names), self._plan()]

    def _retire(self, loop: PlacementLoop, count: int, now: Nanoseconds) -> list[Event]:
        """Cancels workers that have not begun, the latest first, then drains the emptiest."""
        while count and self._starting:
            _, name = self._starting.pop()
            self._spans.append((self._since.pop(name), now))
            count -= 1
        leaving = sorted(self._serving, key=lambda name: loop.workers[name].sessions)[:count]
        self._draining += leaving
        self._serving = [name for name in self._serving if name not in leaving]
        return [self._plan()] if leaving else []

    def _let_go(self, loop: PlacementLoop, now: Nanoseconds) -> list[Event]:
        empty = [name for name in self._draining if loop.workers[name].sessions == 0]
        self._draining = [name for name in self._draining if name not in empty]
        for name in empty:
            self._spans.append((self._since.pop(name), now))
        return [AgentLost(AgentId(name)) for name in empty]

    def _plan(self) -> PlanActivated:
        return PlanActivated(plan_of(self._scaled.run, self._serving))
