"""Workers that come and go as the scheduler's own scaling says, with cold starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from catenary_scheduler.dispatch.chained import ChainedDispatcher
from catenary_scheduler.dispatch.events import AgentJoined, AgentLost, Event, PlanActivated
from catenary_scheduler.scaling.workers.autoscaling import ModelScaling
from catenary_scheduler.scaling.workers.worker_facts import ScalingPolicy, WorkerFacts
from catenary_scheduler.scaling.workers.workers_line import Lengths as MeanLengths
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds
from catenary_simulator.placement.engine import PICOSECONDS, SimulatedSession, SimulatedWorker
from catenary_simulator.placement.loop import PlacementLoop
from catenary_simulator.placement.result import PlacementResult, result_of
from catenary_simulator.placement.serve import MODEL, Run, agent_of, dispatcher_for, plan_of
from catenary_simulator.placement.workload import Workload

_LOOK_NS = NANOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """A run whose workers are scaled.

    Attributes:
        run: With so many workers at the start.
        cold_start_ns: From the order to a worker that serves.
        most: Workers that may be there at once.
        lengths: Of the requests, as a model's history says.
        policy: When workers come and go; its cold start is overwritten.
    """

    run: Run
    cold_start_ns: Nanoseconds
    most: int
    lengths: MeanLengths
    policy: ScalingPolicy = field(default_factory=ScalingPolicy)


@dataclass(frozen=True, slots=True)
class ScaledResult:
    """Figures of a scaled run.

    Attributes:
        served: What became of the requests.
        worker_s: Seconds of all workers, from the order to the end, while requests arrived.
        peak: Workers at a time, with those that start.
        orders: How often the number was changed.
    """

    served: PlacementResult
    worker_s: float
    peak: int
    orders: int


def serve_scaled(scaled: ScaledRun, workload: Workload) -> ScaledResult:
    """Returns how a cluster serves a workload that scales meanwhile."""
    run = scaled.run
    dispatcher = dispatcher_for(run, len(workload))
    cluster = ScaledCluster(scaled, dispatcher)
    loop = PlacementLoop(dispatcher, MODEL, workload, {}, run.objectives, run.ways)
    loop.sweep = dispatcher.take_changes
    loop.overseer = cluster
    for event in cluster.begin(loop):
        dispatcher.handle(event, 0)
    loop.run()
    last = workload.arrived_ns[-1] if len(workload) else 0
    result = result_of(loop, dispatcher.take_decision_times(), dispatcher.statistics())
    return ScaledResult(result, cluster.worker_s(last), cluster.peak, cluster.orders)


class ScaledCluster:
    """Carries out what the scaling orders; implements `Overseer`.

    Args:
        scaled: The run.
        dispatcher: Who places.
    """

    every_ns: Nanoseconds = _LOOK_NS

    def __init__(self, scaled: ScaledRun, dispatcher: ChainedDispatcher) -> None:
        self._scaled = scaled
        self._dispatcher = dispatcher
        policy = replace(scaled.policy, cold_start_ns=scaled.cold_start_ns)
        self.scaling = ModelScaling(MODEL, policy)
        self._made = 0
        self._starting: list[tuple[Nanoseconds, str]] = []
        """When they will serve, in order."""
        self._serving: list[str] = []
        self._draining: list[str] = []
        self._since: dict[str, Nanoseconds] = {}
        """When each that is not gone was ordered."""
        self._spans: list[tuple[Nanoseconds, Nanoseconds]] = []
        """Of those that are gone: ordered, and gone."""
        self.orders = 0
        self.peak = 0

    def begin(self, loop: PlacementLoop) -> list[Event]:
        """Returns the events with which the first workers serve."""
        for _ in range(self._scaled.run.workers):
            self._start(0)
        return self._begin_serving(loop, self._scaled.cold_start_ns, at=0)

    def arrived(self, session: SimulatedSession, now: Nanoseconds) -> None:
        """Tells the scaling of a request."""
        self.scaling.arrived(session.prompt_tokens, now)

    def ended(self, session: SimulatedSession, now: Nanoseconds) -> None:
        """Tells the scaling how a session went."""
        first_ns = (session.first_ps - session.arrived_ps) // PICOSECONDS
        decode_ns = (session.last_ps - session.first_ps) // PICOSECONDS
        outcome = (session.answer_tokens, first_ns, decode_ns)
        arrived_ns = session.arrived_ps // PICOSECONDS
        self.scaling.finished(outcome, self._scaled.run.objectives, arrived_ns, now)

    def look(self, loop: PlacementLoop, now: Nanoseconds) -> list[Event]:
        """Has started workers serve, orders what the scaling wants, lets empty ones go."""
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
        """Returns the seconds of all workers until a moment."""
        spans = [*self._spans, *((since, until) for since in self._since.values())]
        total = sum(max(0, min(end, until) - min(since, until)) for since, end in spans)
        return total / NANOSECONDS_PER_SECOND

    def _facts(self, loop: PlacementLoop) -> WorkerFacts:
        run, lengths = self._scaled.run, self._scaled.lengths
        tokens = lengths.prompt_tokens + lengths.answer_tokens
        slots = int(run.kind.cache_tokens / max(1.0, run.kind.lines.cache(tokens)))
        statistics = self._dispatcher.statistics()
        return WorkerFacts(
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
        """Calls off who has not begun yet, the latest first, then drains the emptiest."""
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
