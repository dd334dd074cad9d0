"""The event heap around a dispatcher of sessions, which it runs on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

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
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    GatewayId,
    ModelKey,
    Nanoseconds,
    RequestId,
    SessionId,
)
from catenary_services.domain.plan import ChainHop
from catenary_services.errors import InternalError
from catenary_simulator.chains.cluster import ChainsCluster
from catenary_simulator.chains.workload import SessionWorkload

_GATEWAY = GatewayId("simulated")
_NEVER = 1 << 62
_SWEPT = 1024
"""Number of arrivals between two calls of `sweep`."""
_REPORT_NS = 10 * NANOSECONDS_PER_SECOND
"""Nanoseconds between two reports of a session's tokens. Gateways report far more often; here the
reports only keep a session that generates from being taken for a silent one."""


class SessionDurations:
    """The durations of a workload's sessions on any chain.

    Args:
        cluster: The cluster with the speeds of its servers.
        workload: The workload with the sizes and tokens of its sessions.
    """

    def __init__(self, cluster: ChainsCluster, workload: SessionWorkload) -> None:
        self._speeds = {server.name: server.speed for server in cluster.servers}
        self._workload = workload
        self._chains: dict[tuple[ChainHop, ...], tuple[float, float, float]] = {}
        self._by_identity: dict[int, tuple[float, float, float]] = {}
        self._kept: list[tuple[ChainHop, ...]] = []

    def of(self, number: int, hops: tuple[ChainHop, ...]) -> Nanoseconds:
        """Returns the duration of session `number` of the workload on a chain."""
        # Dispatchers hand out the same hops again and again; hashing them costs more than the rest.
        sums = self._by_identity.get(id(hops))
        if sums is None:
            sums = self._sums(hops)
            self._kept.append(hops)
            self._by_identity[id(hops)] = sums
        work = self._workload
        seconds = sums[0] + sums[1] * work.inputs[number] + sums[2] * work.outputs[number]
        return round(work.sizes[number] * seconds * NANOSECONDS_PER_SECOND)

    def _sums(self, hops: tuple[ChainHop, ...]) -> tuple[float, float, float]:
        """Returns a whole chain's seconds as a triple: fixed, per input and per output token."""
        known = self._chains.get(hops)
        if known is not None:
            return known
        fixed = per_input = per_output = 0.0
        for hop in hops:
            speed = self._speeds[hop.agent]
            fixed += speed.fixed_ms + hop.blocks * speed.block_fixed_ms
            per_input += hop.blocks * speed.block_input_ms
            per_output += speed.per_output_ms + hop.blocks * speed.block_output_ms
        self._chains[hops] = (fixed / 1000, per_input / 1000, per_output / 1000)
        return self._chains[hops]


class _Running(NamedTuple):
    """A session that runs on a chain."""

    number: int
    """Index of its request in the workload."""
    started_ns: Nanoseconds
    end_ns: Nanoseconds


class SessionLoop:
    """A run of a workload: sessions arrive, and the loop goes on until all have ended.

    Args:
        dispatcher: The dispatcher, which has its plan already.
        model: The model of all sessions.
        workload: The sessions.
        durations: Their durations by chain.
        sweep: Called now and then to drop records that a dispatcher keeps for others.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ModelKey,
        workload: SessionWorkload,
        durations: SessionDurations,
        sweep: Callable[[], object] = lambda: None,
    ) -> None:
        self._sweep = sweep
        self._dispatcher = dispatcher
        self._model = model
        self._workload = workload
        self._durations = durations
        self._due: list[tuple[Nanoseconds, SessionId]] = []
        """Heap of the times of ends and reports. Entries of closed sessions stay until their time
        comes."""
        self._running: dict[SessionId, _Running] = {}
        self._events: deque[Event] = deque()
        self.started_ns: list[Nanoseconds] = [-1] * len(workload)
        """Start of each session by number; -1 for one that has not started or was rejected."""
        self.ended_ns: list[Nanoseconds] = [-1] * len(workload)
        self.rejected = 0
        self.events = 0

    def run(self) -> None:
        """Runs until every session has ended.

        Raises:
            InternalError: Sessions are left that nothing will ever start.
        """
        arrived, count = self._workload.arrived_ns, len(self._workload)
        next_arrival, wake = 0, self._wakeup()
        while True:
            arrival = arrived[next_arrival] if next_arrival < count else _NEVER
            due = self._due[0][0] if self._due else _NEVER
            if due <= arrival and due <= wake and due != _NEVER:
                now = due
                self._look(heappop(self._due)[1], now)
            elif arrival <= wake and arrival != _NEVER:
                now = arrival
                self._events.append(self._request(next_arrival))
                next_arrival += 1
            elif wake == _NEVER:
                break
            else:
                now = wake
                self._events.append(Tick())
            self._tell(now)
            wake = self._wakeup()
            if next_arrival == count and not self._running and self._answered(count):
                return
            if wake <= now:
                raise InternalError(f"the dispatcher wants to be woken at {wake} again")
        if not self._answered(count):
            raise InternalError(f"{self._waiting(count)} sessions are never started")

    def _answered(self, count: int) -> bool:
        return self._waiting(count) == 0

    def _waiting(self, count: int) -> int:
        return self.started_ns.count(-1) - self.rejected if count else 0

    def _wakeup(self) -> Nanoseconds:
        moment = self._dispatcher.next_wakeup()
        return _NEVER if moment is None else moment

    def _request(self, number: int) -> SessionRequested:
        work = self._workload
        if number % _SWEPT == 0:
            self._sweep()
        return SessionRequested(
            RequestId(_GATEWAY, number),
            self._model,
            max(1, round(work.inputs[number])),
            max(1, round(work.outputs[number])),
            _NEVER,
        )

    def _look(self, session: SessionId, now: Nanoseconds) -> None:
        running = self._running.get(session)
        if running is None:  # it was closed, and its request started again
            return
        if now < running.end_ns:
            self._events.append(SessionsProgressed((self._progress(running, now),)))
            heappush(self._due, (min(now + _REPORT_NS, running.end_ns), session))
            return
        # The last token is out: the gateway has everything, every agent will free its slots.
        del self._running[session]
        self.ended_ns[running.number] = now
        self._events.append(RequestCompleted(RequestId(_GATEWAY, running.number)))

    def _progress(self, running: _Running, now: Nanoseconds) -> SessionProgress:
        """Returns the progress of a session, as if its tokens came evenly.

        Jobs in the paper's model have no times but their start and their end.
        """
        number = running.number
        tokens = max(1, round(self._workload.outputs[number]))
        since_ns = now - running.started_ns
        got = 1 + (tokens - 1) * since_ns // (running.end_ns - running.started_ns)
        waited_ns = running.started_ns - self._workload.arrived_ns[number]
        return SessionProgress(RequestId(_GATEWAY, number), got, waited_ns, since_ns)

    def _tell(self, now: Nanoseconds) -> None:
        events, dispatcher = self._events, self._dispatcher
        while events:
            self.events += 1
            for command in dispatcher.handle(events.popleft(), now):
                self._carry_out(command, now)

    def _carry_out(self, command: Command, now: Nanoseconds) -> None:
        if isinstance(command, StartSession):
            self._start(command, now)
        elif isinstance(command, CloseSessions):
            for session in command.sessions:
                self._running.pop(session, None)
            self._events.append(SessionsClosed(command.agent, command.sessions))
        elif isinstance(command, Reject):
            self.rejected += 1

    def _start(self, command: StartSession, now: Nanoseconds) -> None:
        number = command.request.number
        self.started_ns[number] = now
        end_ns = now + self._durations.of(number, command.hops)
        heappush(self._due, (min(now + _REPORT_NS, end_ns), command.session))
        self._running[command.session] = _Running(number, now, end_ns)
