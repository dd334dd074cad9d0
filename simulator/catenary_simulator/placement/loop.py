"""Sessions on workers, driven by the kernel: placed by a dispatcher, run step by step, reported."""

from __future__ import annotations

from dataclasses import dataclass
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
)
from catenary_services.domain.ids import ModelKey, Nanoseconds, RequestId
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from catenary_services.errors import InternalError
from catenary_simulator.kernel import GATEWAY, NEVER, Kernel
from catenary_simulator.placement.engine import PICOSECONDS, SimulatedSession, SimulatedWorker
from catenary_simulator.placement.workload import RequestWorkload

# Kinds of entries, in the order in which those of one moment happen. The last two are periodic.
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


class PlacementLoop(Kernel):
    """The kernel's subclass for sessions on workers; its clock counts picoseconds.

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
        super().__init__(dispatcher, workload.arrived_ns, PICOSECONDS, periodic_from=_REPORTED)
        self.controller: RunController | None = None
        self.requests = len(workload)
        self._model = model
        self._workload = workload
        self.workers = workers
        self._by_index = list(workers.values())
        self.objectives = objectives
        self.are_named = True
        """Whether requests name their objectives; if not, they are only measured by them."""
        self._delays = delays
        self._open: dict[int, SimulatedSession] = {}
        """Sessions by the number of their request, from its arrival to its end."""
        self.ended: list[SimulatedSession] = []
        self.rejected: list[int] = []
        self.missed = 0
        """Number of sessions that ended without meeting their objectives, and of rejected
        requests."""
        self.may_miss = len(workload)
        """Number of missed sessions above which the run ends, because its outcome is decided."""
        self.used = 0
        """Number of workers with a session."""
        self.peak_used = 0
        self.used_area = 0
        """Integral over time of the number of workers with a session, in worker-picoseconds."""
        self.arriving_area = 0
        """The value of `used_area` at the last arrival."""
        self._used_since = 0
        self.arriving_ps = 0
        """Time at which the last request arrived, in picoseconds."""
        self.tells_beginnings = True
        """Whether the dispatcher is told how prompts begin."""
        self.shared_tokens = 0
        """Tokens of prompts, in whole blocks, that requests before had in their texts."""
        self._seen: set[int] = set()
        self.busy_ps = 0
        """Time that all workers together computed until the last arrival, in picoseconds."""

    @property
    def decided(self) -> bool:
        """True if the run was ended early because too many missed."""
        return self.missed > self.may_miss

    def run(self) -> None:
        """Runs until every request has ended, or too many have missed; see `Kernel.run`."""
        if self._delays.report_every_ns and self.requests:
            self.at(self._delays.report_every_ns * PICOSECONDS, _REPORTED, None)
        if self.controller is not None:
            self.at(self.controller.every_ns * PICOSECONDS, _LOOKED, None)
        super().run()

    # The kernel's methods

    def arrive(self, number: int) -> None:
        """Requests a session from the dispatcher."""
        work = self._workload
        request = RequestId(GATEWAY, number)
        session = SimulatedSession(request, work.prompts[number], work.answers[number], self.now)
        session.blocks = work.blocks(number, session.prompt_tokens + session.answer_tokens)
        self._count_shared(session)
        self._open[number] = session
        if self.controller is not None:
            self.controller.arrived(session, self.now_ns())
        longest = max(self._delays.answer_tokens, session.answer_tokens)
        self.tell(
            SessionRequested(
                request,
                self._model,
                session.prompt_tokens,
                longest,
                NEVER,
                arrived_ns=self.now_ns(),
                objectives=self.objectives if self.are_named else None,
                prefix_hashes=self._hashes(session, 0, session.prompt_tokens),
            )
        )
        if not self.has_arrivals():
            self._all_arrived()

    def happen(self, order: int, what: object) -> None:
        """Handles the end of a worker's step, a started session, news or a periodic entry."""
        if order == _BOUNDARY:
            assert isinstance(what, SimulatedWorker)
            # A boundary that was brought forward leaves its old entry behind.
            if what.ends_ps == self.now:
                self._ended(what, what.boundary())
                self._follow(what)
        elif order == _STARTED:
            assert isinstance(what, SimulatedSession)
            if what.request.number in self._open:
                self._submit(self._by_index[what.worker], what)
        elif order == _TOLD:
            if isinstance(what, (SessionsClosed, RequestCompleted, SessionsProgressed)):
                self.tell(what)
        elif order == _REPORTED:
            self._report()
        else:
            self._look()

    def carry_out(self, commands: list[Command]) -> None:
        """Starts, closes and rejects sessions."""
        for command in commands:
            if isinstance(command, StartSession):
                self._start(command)
            elif isinstance(command, CloseSessions):
                self._later(SessionsClosed(command.agent, command.sessions))
            elif isinstance(command, Reject):
                number = command.request.number
                if number in self._open:
                    del self._open[number]
                    self.rejected.append(number)
                    self._miss()

    def unanswered(self) -> int:
        """Returns the number of requests that have arrived and are not answered yet."""
        return len(self._open)

    def is_over(self) -> bool:
        return not self._open

    # The handling of entries

    def _all_arrived(self) -> None:
        """Records the figures that are measured only while requests arrive."""
        self._count_used(0)
        self.arriving_ps, self.arriving_area = self.now, self.used_area
        self.busy_ps = sum([worker.busy_ps for worker in self._by_index])

    def _submit(self, worker: SimulatedWorker, session: SimulatedSession) -> None:
        if not worker.can_ever_hold(session):
            self._fail(session)
            return
        if worker.sessions == 0:
            self._count_used(1)
        over = worker.submit(session, self.now)
        self._ended(worker, over)
        self._follow(worker)

    def _fail(self, session: SimulatedSession) -> None:
        """Ends a session with an error, because its cache exceeds that of its worker."""
        number = session.request.number
        self.rejected.append(number)
        self._miss()
        del self._open[number]
        self._later(RequestCompleted(session.request))

    def _ended(self, worker: SimulatedWorker, over: list[SimulatedSession]) -> None:
        for session in over:
            self.ended.append(session)
            self._seen.update(session.blocks)
            if not self.attained(session):
                self._miss()
            del self._open[session.request.number]
            if self.controller is not None:
                self.controller.ended(session, self.now_ns())
            self._later(
                RequestCompleted(
                    session.request,
                    self._progress(session, session.answer_tokens, session.last_ps),
                    self._hashes(
                        session,
                        session.prompt_tokens,
                        session.prompt_tokens + session.answer_tokens,
                    ),
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
            steps, last_step_ps = worker.progress_at(self.now)
            for session in worker.running:
                tokens, last_ps = worker.state_of(session, steps, last_step_ps)
                if tokens > session.reported:
                    session.reported = tokens
                    found.append(self._progress(session, tokens, last_ps))
        if found:
            self._later(SessionsProgressed(tuple(found)))
        self.at(self.now + every * PICOSECONDS, _REPORTED, None)

    def _progress(self, session: SimulatedSession, tokens: int, last_ps: int) -> SessionProgress:
        return SessionProgress(
            session.request,
            tokens,
            (session.first_ps - session.arrived_ps) // PICOSECONDS,
            (last_ps - session.first_ps) // PICOSECONDS,
            session.reused,
        )

    def _count_shared(self, session: SimulatedSession) -> None:
        """Counts how much of a prompt some request before it had in its text."""
        prompt = session.blocks[: session.prompt_tokens // PREFIX_BLOCK_TOKENS]
        most = (session.prompt_tokens - 1) // PREFIX_BLOCK_TOKENS
        count = 0
        while count < most and prompt[count : count + 1] and prompt[count] in self._seen:
            count += 1
        self.shared_tokens += count * PREFIX_BLOCK_TOKENS
        self._seen.update(prompt)

    def _hashes(self, session: SimulatedSession, begin: int, end: int) -> tuple[int, ...]:
        if not self.tells_beginnings:
            return ()
        return session.blocks[begin // PREFIX_BLOCK_TOKENS : end // PREFIX_BLOCK_TOKENS]

    def add_worker(self, name: str, worker: SimulatedWorker) -> None:
        """Adds a worker by the name of its agent; its index must follow the last one's."""
        self.workers[name] = worker
        self._by_index.append(worker)

    def _look(self) -> None:
        controller = self.controller
        if controller is not None:
            for event in controller.look(self, self.now_ns()):
                self.tell(event)
            self.at(self.now + controller.every_ns * PICOSECONDS, _LOOKED, None)

    # Helpers

    def _start(self, command: StartSession) -> None:
        session = self._open.get(command.request.number)
        if session is None:
            return
        if session.session is not None:
            raise InternalError(f"{command.request} is started again")
        session.session = command.session
        agent = (command.decode_hops or command.hops)[0].agent
        session.worker = self.workers[agent].index
        self.at(self.now + self._delays.start_ns * PICOSECONDS, _STARTED, session)

    def _later(self, event: Event) -> None:
        self.at(self.now + self._delays.notice_ns * PICOSECONDS, _TOLD, event)

    def _follow(self, worker: SimulatedWorker) -> None:
        if worker.ends_ps >= 0 and worker.ends_ps != worker.announced_ps:
            worker.announced_ps = worker.ends_ps
            self.at(worker.ends_ps, _BOUNDARY, worker)

    def _miss(self) -> None:
        self.missed += 1
        if self.decided:
            self.stop()

    def _count_used(self, change: int) -> None:
        self.used_area += self.used * (self.now - self._used_since)
        self._used_since = self.now
        self.used += change
        self.peak_used = max(self.peak_used, self.used)
