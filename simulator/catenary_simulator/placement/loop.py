"""The event heap around a dispatcher that places sessions, run on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from catenary_scheduler.dispatch.events import (
    CloseSessions,
    Command,
    Dispatcher,
    Event,
    Reject,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import GatewayId, ModelKey, Nanoseconds, RequestId
from catenary_services.domain.latency import TokenObjectives
from catenary_services.errors import InternalError
from catenary_simulator.placement.engine import PICOSECONDS, SimulatedSession, SimulatedWorker
from catenary_simulator.placement.workload import RequestWorkload

_GATEWAY = GatewayId("simulated")
_NEVER = 1 << 62
_DEADLINE_NS = 1 << 60
_SWEPT = 1024
"""Number of arrivals between two calls of `sweep`."""
_IDLE_WAKES = 10_000

# What an entry of the heap is; at one moment in this order.
_STARTED = 0
_TOLD = 1
_BOUNDARY = 2
_REPORTED = 3
_LOOKED = 4


class RunController(Protocol):
    """A controller that watches a run and changes its cluster."""

    @property
    def every_ns(self) -> Nanoseconds:
        """Time between two calls of `look`."""
        ...

    def arrived(self, session: SimulatedSession, now: Nanoseconds) -> None:
        """Called for every request that arrives."""
        ...

    def ended(self, session: SimulatedSession, now: Nanoseconds) -> None:
        """Called for every session that has all its tokens."""
        ...

    def look(self, loop: PlacementLoop, now: Nanoseconds) -> list[Event]:
        """Returns events for the dispatcher; may add workers to the loop."""
        ...


@dataclass(frozen=True, slots=True)
class ReportDelays:
    """Delays and intervals of messages in a run.

    Attributes:
        start_ns: Delay from the decision to the worker.
        notice_ns: Delay from a gateway or a worker to the dispatcher.
        report_every_ns: Interval of progress reports by gateways; 0: they report ends only.
        answer_tokens: Most tokens that a request asks for.
    """

    start_ns: Nanoseconds = 1_000_000
    notice_ns: Nanoseconds = 1_000_000
    report_every_ns: Nanoseconds = 100_000_000
    answer_tokens: int = 2048


class PlacementLoop:
    """A run of a placement workload, which goes on until all requests have ended.

    Args:
        dispatcher: The dispatcher, which has its agents and its plan already.
        model: The model of all requests.
        workload: The requests.
        workers: The workers by the names of their agents.
        objectives: The objectives of all requests.
        delays: Delays and intervals of messages.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ModelKey,
        workload: RequestWorkload,
        workers: dict[str, SimulatedWorker],
        objectives: TokenObjectives,
        delays: ReportDelays,
    ) -> None:
        self.sweep: Callable[[], object] | None = None
        """Called now and then to drop records that a dispatcher keeps for others; None: never."""
        self.controller: RunController | None = None
        self.requests = len(workload)
        self._dispatcher = dispatcher
        self._model = model
        self._workload = workload
        self.workers = workers
        self._by_index = list(workers.values())
        self.objectives = objectives
        self._delays = delays
        self._heap: list[tuple[int, int, int, int, object]] = []
        """Heap of entries (time in ps, kind, sequence, number, content)."""
        self._sequence = 0
        self._events: list[Event] = []
        self._open: dict[int, SimulatedSession] = {}
        """Sessions by the number of their request, from its arrival to its end."""
        self.ended: list[SimulatedSession] = []
        self.rejected: list[int] = []
        self.missed = 0
        """Number of sessions that ended without meeting their objectives, and of rejected
        requests."""
        self.may_miss = len(workload)
        """The run ends early when `missed` exceeds this, because its outcome is decided."""
        self.events = 0
        self.now_ps = 0
        self.used = 0
        """Number of workers with a session."""
        self.peak_used = 0
        self.used_area = 0
        """Integral over time of the workers with a session, in worker-picoseconds."""
        self.arriving_area = 0
        """The value of `used_area` at the last arrival."""
        self._used_since = 0
        self.arriving_ps = 0
        """Time at which the last request arrived."""
        self.busy_ps = 0
        """Time that all workers computed until the last arrival, summed."""

    @property
    def decided(self) -> bool:
        """True if the run was ended early because too many missed."""
        return self.missed > self.may_miss

    def run(self) -> None:
        """Runs until every request has ended, or too many have missed.

        Raises:
            InternalError: Requests are left that nothing will ever end.
        """
        arrived, count = self._workload.arrived_ns, len(self._workload)
        heap = self._heap
        next_arrival, idle = 0, 0
        if self._delays.report_every_ns and count:
            self._push(self._delays.report_every_ns * PICOSECONDS, _REPORTED, 0, None)
        if self.controller is not None:
            self._push(self.controller.every_ns * PICOSECONDS, _LOOKED, 0, None)
        while next_arrival < count or self._open:
            if self.missed > self.may_miss:
                return
            arrival = arrived[next_arrival] * PICOSECONDS if next_arrival < count else _NEVER
            wake = self._wakeup()
            moment = heap[0][0] if heap else _NEVER
            if min(arrival, wake, moment) >= _NEVER:
                raise InternalError(f"{len(self._open)} requests are never answered")
            idle += 1
            if moment <= arrival and moment <= wake:
                entry = heappop(heap)
                self._advance(moment)
                idle = idle if entry[1] >= _REPORTED else 0
                self._happen(entry[1], entry[3], entry[4])
            elif arrival <= wake:
                idle = 0
                self._advance(arrival)
                self._arrive(next_arrival)
                next_arrival += 1
                if next_arrival == count:
                    self._all_arrived()
            else:
                self._advance(max(wake, self.now_ps))
                self._events.append(Tick())
            self._tell()
            if idle > _IDLE_WAKES:
                raise InternalError(f"{len(self._open)} requests wait and nothing happens")

    # What happens

    def _happen(self, kind: int, number: int, what: object) -> None:
        if kind == _BOUNDARY:
            worker = self._by_index[number]
            # A boundary that was brought forward leaves its old entry behind.
            if worker.ends_ps == self.now_ps:
                over = worker.boundary()
                self._ended(worker, over)
                self._follow(worker)
        elif kind == _STARTED:
            session = self._open.get(number)
            if session is not None:
                self._submit(self._by_index[session.worker], session)
        elif kind == _TOLD:
            if isinstance(what, (SessionsClosed, RequestCompleted, SessionsProgressed)):
                self._events.append(what)
        elif kind == _REPORTED:
            self._report()
        else:
            self._look()

    def _arrive(self, number: int) -> None:
        work = self._workload
        if self.sweep is not None and number % _SWEPT == 0:
            self.sweep()
        request = RequestId(_GATEWAY, number)
        session = SimulatedSession(request, work.prompts[number], work.answers[number], self.now_ps)
        self._open[number] = session
        if self.controller is not None:
            self.controller.arrived(session, self._now_ns())
        longest = max(self._delays.answer_tokens, session.answer_tokens)
        self._events.append(
            SessionRequested(
                request,
                self._model,
                session.prompt_tokens,
                longest,
                _DEADLINE_NS,
                arrived_ns=self._now_ns(),
                objectives=self.objectives,
            )
        )

    def _all_arrived(self) -> None:
        """Records the figures that are measured only while requests arrive."""
        self._count_used(0)
        self.arriving_ps, self.arriving_area = self.now_ps, self.used_area
        self.busy_ps = sum([worker.busy_ps for worker in self._by_index])

    def _submit(self, worker: SimulatedWorker, session: SimulatedSession) -> None:
        if not worker.can_ever_hold(session):
            self._fail(session)
            return
        if worker.sessions == 0:
            self._count_used(1)
        over = worker.submit(session, self.now_ps)
        self._ended(worker, over)
        self._follow(worker)

    def _fail(self, session: SimulatedSession) -> None:
        """Ends a session with an error, because its cache exceeds that of its worker."""
        number = session.request.number
        self.rejected.append(number)
        self.missed += 1
        del self._open[number]
        self._later(RequestCompleted(session.request))

    def _ended(self, worker: SimulatedWorker, over: list[SimulatedSession]) -> None:
        for session in over:
            self.ended.append(session)
            self.missed += not self.attained(session)
            del self._open[session.request.number]
            if self.controller is not None:
                self.controller.ended(session, self._now_ns())
            self._later(
                RequestCompleted(
                    session.request,
                    self._progress(session, session.answer_tokens, session.last_ps),
                )
            )
        if over and worker.sessions == 0:
            self._count_used(-1)

    def attained(self, session: SimulatedSession) -> bool:
        """Returns True if a session that is over met its objectives."""
        limits = self.objectives
        first_ps = session.first_ps - session.arrived_ps
        if limits.first_token_ns and first_ps > limits.first_token_ns * PICOSECONDS:
            return False
        steps = session.answer_tokens - 1
        decode_ps = session.last_ps - session.first_ps
        most_ps = limits.per_token_ns * steps * PICOSECONDS
        return not (limits.per_token_ns and steps and decode_ps > most_ps)

    def _report(self) -> None:
        every = self._delays.report_every_ns
        found: list[SessionProgress] = []
        for worker in self._by_index:
            if not worker.running:
                continue
            steps, last_step_ps = worker.progress_at(self.now_ps)
            for session in worker.running:
                tokens, last_ps = worker.state_of(session, steps, last_step_ps)
                if tokens > session.reported:
                    session.reported = tokens
                    found.append(self._progress(session, tokens, last_ps))
        if found:
            self._later(SessionsProgressed(tuple(found)))
        self._push(self.now_ps + every * PICOSECONDS, _REPORTED, 0, None)

    def _progress(self, session: SimulatedSession, tokens: int, last_ps: int) -> SessionProgress:
        return SessionProgress(
            session.request,
            tokens,
            (session.first_ps - session.arrived_ps) // PICOSECONDS,
            (last_ps - session.first_ps) // PICOSECONDS,
        )

    def add_worker(self, name: str, worker: SimulatedWorker) -> None:
        """Adds a worker by the name of its agent; its index must follow the last one's."""
        self.workers[name] = worker
        self._by_index.append(worker)

    def _look(self) -> None:
        controller = self.controller
        if controller is not None:
            self._events += controller.look(self, self._now_ns())
            self._push(self.now_ps + controller.every_ns * PICOSECONDS, _LOOKED, 0, None)

    # The dispatcher

    def _tell(self) -> None:
        now = self._now_ns()
        while self._events:
            events, self._events = self._events, []
            for event in events:
                self.events += 1
                commands = self._dispatcher.handle(event, now)
                for command in commands:
                    self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, StartSession):
            session = self._open.get(command.request.number)
            if session is None:
                return
            if session.session is not None:
                raise InternalError(f"{command.request} is started again")
            session.session = command.session
            agent = (command.decode_hops or command.hops)[0].agent
            session.worker = self.workers[agent].index
            moment = self.now_ps + self._delays.start_ns * PICOSECONDS
            self._push(moment, _STARTED, command.request.number, None)
        elif isinstance(command, CloseSessions):
            self._later(SessionsClosed(command.agent, command.sessions))
        elif isinstance(command, Reject):
            number = command.request.number
            if number in self._open:
                del self._open[number]
                self.rejected.append(number)
                self.missed += 1

    def _wakeup(self) -> int:
        moment = self._dispatcher.next_wakeup()
        return _NEVER if moment is None or moment >= _DEADLINE_NS else moment * PICOSECONDS

    # Inside

    def _now_ns(self) -> Nanoseconds:
        return -(-self.now_ps // PICOSECONDS)

    def _advance(self, moment_ps: int) -> None:
        self.now_ps = moment_ps

    def _later(self, event: Event) -> None:
        self._push(self.now_ps + self._delays.notice_ns * PICOSECONDS, _TOLD, 0, event)

    def _push(self, moment_ps: int, kind: int, number: int, what: object) -> None:
        self._sequence += 1
        heappush(self._heap, (moment_ps, kind, self._sequence, number, what))

    def _follow(self, worker: SimulatedWorker) -> None:
        if worker.ends_ps >= 0 and worker.ends_ps != worker.announced_ps:
            worker.announced_ps = worker.ends_ps
            self._push(worker.ends_ps, _BOUNDARY, worker.index, None)

    def _count_used(self, change: int) -> None:
        self.used_area += self.used * (self.now_ps - self._used_since)
        self._used_since = self.now_ps
        self.used += change
        self.peak_used = max(self.peak_used, self.used)
