"""Sessions on chains, driven by the kernel: started, reported and ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from catenary_scheduler.dispatch.events import (
    CloseSessions,
    Command,
    Dispatcher,
    Reject,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
    StartSession,
)
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds, RequestId
from catenary_services.domain.plan import ChainHop
from catenary_simulator.chains.cluster import ChainsCluster
from catenary_simulator.chains.workload import SessionWorkload
from catenary_simulator.kernel import GATEWAY, NEVER, Kernel

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


class SessionLoop(Kernel):
    """The kernel's subclass for sessions on chains.

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
        sweep: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(dispatcher, workload.arrived_ns)
        self.sweep = sweep
        self._model = model
        self._workload = workload
        self._durations = durations
        self._running: dict[int, _Running] = {}
        """Running sessions by the id that the dispatcher gave them."""
        self.started_ns: list[Nanoseconds] = [-1] * len(workload)
        """Start of each session by number; -1 for one that has not started or was rejected."""
        self.ended_ns: list[Nanoseconds] = [-1] * len(workload)
        self.rejected = 0

    def arrive(self, number: int) -> None:
        work = self._workload
        self.tell(
            SessionRequested(
                RequestId(GATEWAY, number),
                self._model,
                max(1, round(work.inputs[number])),
                max(1, round(work.outputs[number])),
                NEVER,
            )
        )

    def happen(self, order: int, what: object) -> None:
        """Reports or ends the session whose id is `order`."""
        now = self.now
        running = self._running.get(order)
        if running is None:  # the session was closed, and its request started again
            return
        if now < running.end_ns:
            self.tell(SessionsProgressed((self._progress(running, now),)))
            self.at(min(now + _REPORT_NS, running.end_ns), order, None)
            return
        # The last token is out: the gateway has all tokens, and every agent will free its slots.
        del self._running[order]
        self.ended_ns[running.number] = now
        self.tell(RequestCompleted(RequestId(GATEWAY, running.number)))

    def carry_out(self, commands: list[Command]) -> None:
        """Starts, closes and rejects sessions."""
        for command in commands:
            if isinstance(command, StartSession):
                self._start(command)
            elif isinstance(command, CloseSessions):
                for session in command.sessions:
                    self._running.pop(session, None)
                self.tell(SessionsClosed(command.agent, command.sessions))
            elif isinstance(command, Reject):
                self.rejected += 1

    def unanswered(self) -> int:
        """Returns the number of requests that were neither started nor rejected."""
        return self.started_ns.count(-1) - self.rejected

    def is_over(self) -> bool:
        return not self._running and self.unanswered() == 0

    def _progress(self, running: _Running, now: Nanoseconds) -> SessionProgress:
        """Returns the progress of a session, as if its tokens came evenly.

        Jobs in the paper's model have no times but their start and their end.
        """
        number = running.number
        tokens = max(1, round(self._workload.outputs[number]))
        since_ns = now - running.started_ns
        got = 1 + (tokens - 1) * since_ns // (running.end_ns - running.started_ns)
        waited_ns = running.started_ns - self._workload.arrived_ns[number]
        return SessionProgress(RequestId(GATEWAY, number), got, waited_ns, since_ns)

    def _start(self, command: StartSession) -> None:
        number, now = command.request.number, self.now
        self.started_ns[number] = now
        end_ns = now + self._durations.of(number, command.hops)
        self._running[command.session] = _Running(number, now, end_ns)
        # At one moment sessions end in the order of their ids.
        self.at(min(now + _REPORT_NS, end_ns), command.session, None)
