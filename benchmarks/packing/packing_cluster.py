"""Chains, sessions and time around the real dispatcher, on which packing is tried and measured.

Sessions get a token at regular intervals, gateways report ten times a second, a session that is to
move is handed over after a while, and agents free what they are told to free. Everything else,
which session is where and which moves, is the dispatcher's. Whatever it orders is checked: no chain
is asked for more than its slots, and none, because of a move, for more cache than it has.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from benchmarks.packing.packing_setup import FAR, MODEL, MS, Setup, chains_of, plan_of
from catenary_lab.policies import policy_named
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    CloseSessions,
    Command,
    Event,
    MoveCostsMeasured,
    PlanActivated,
    Reject,
    RequestCompleted,
    SessionFailed,
    SessionMoved,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsHeld,
    SessionsProgressed,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    Nanoseconds,
    RequestId,
    ServerId,
    SessionId,
)
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.plan import Agent, ChainHop

REPORT_NS = 100 * MS
_ANSWER_NS = MS
"""Nanoseconds after which an agent that is told to close a session reports it closed."""


@dataclass
class Served:
    """A request, as its client sees it."""

    request: RequestId
    prompt: int
    answer: int
    arrived: Nanoseconds
    session: SessionId | None = None
    chain: str = ""
    generated: float = 0.0
    first: Nanoseconds = 0
    moves: int = 0
    starts: int = 0
    over: bool = False

    @property
    def tokens(self) -> int:
        """Tokens in its cache."""
        return self.prompt + int(self.generated)


class PackedCluster:
    """A dispatcher and the world around it, in virtual time."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now: Nanoseconds = 0
        self.requests: list[Served] = []
        self.rejected: list[Reject] = []
        self.moves: list[tuple[Nanoseconds, RequestId, str, str, str]] = []
        """Moves: time, request, chain of origin, target chain, and mode."""
        self.chain_ns = 0
        """Integral over time of the number of chains that hold sessions."""
        self.availability = Availability(everything_loaded=True)
        self.dispatcher = ChainedDispatcher(
            ChainedConfig(packing=setup.rules, checked=setup.checked),
            availability=self.availability,
            policy=policy_named(setup.policy, lambda n: 0),
        )
        self.chains = chains_of(setup)
        self.agents = sorted({hop.agent for chain in self.chains for hop in chain.hops})
        self._events: list[tuple[Nanoseconds, int, Event]] = []
        self._count = 0
        self._by_session: dict[SessionId, Served] = {}
        self._arriving: dict[SessionId, tuple[Served, str]] = {}
        self._running: dict[RequestId, Served] = {}
        self._capacity = {each.chain_id: each.cache_tokens for each in self.chains}
        self._reported: Nanoseconds = 0
        self._described: dict[AgentId, Agent] = {}
        for number, agent in enumerate(self.agents):
            device = setup.classes[number] if setup.classes else "x"
            self._described[agent] = Agent(
                agent, device, ServerId(agent), 1, setup.link_bytes_per_second
            )
            self.join(agent)
        self.tell(MoveCostsMeasured((), ((MODEL, setup.cache_bytes_per_token),)))
        self.activate(setup.goal)

    def activate(self, goal: PackingGoal) -> None:
        """Puts the plan in force, with a packing goal."""
        self.tell(PlanActivated(plan_of(self.setup, self.chains, goal)))

    # ---- events ----

    def arrive(self, prompt: int, answer: int, objectives: TokenObjectives | None = None) -> Served:
        """Lets a request arrive now."""
        self._count += 1
        request = RequestId(GatewayId("g"), self._count)
        served = Served(request, prompt, answer, self.now)
        self.requests.append(served)
        self._running[request] = served
        self.tell(
            SessionRequested(
                request, MODEL, prompt, max(answer, 4096 - prompt), FAR, objectives=objectives
            )
        )
        return served

    def lose(self, agent: AgentId) -> None:
        """Removes an agent, and all it held with it."""
        gone = {chain.chain_id for chain in self.chains if agent in {h.agent for h in chain.hops}}
        for session, (served, chain) in list(self._arriving.items()):
            if chain in gone or served.chain in gone:
                del self._arriving[session]
        for served in self._running.values():
            if served.chain in gone and served.session is not None:
                self._by_session.pop(served.session, None)
                served.session, served.chain = None, ""
        self.tell(AgentLost(agent))

    def join(self, agent: AgentId) -> None:
        """Lets an agent join, or return, with nothing."""
        self.availability.clear(agent, Impairment.DRAINING)
        self.tell(SessionsHeld(agent, ()))
        self.tell(AgentJoined(self._described[agent]))

    def drain(self, agent: AgentId) -> None:
        """Starts to drain an agent."""
        self.availability.impair(agent, Impairment.DRAINING)
        self.tell(Tick())

    def run(self, until: Nanoseconds) -> None:
        """Lets time pass until `until`."""
        while True:
            wake = self.dispatcher.next_wakeup()
            moments = [self._reported + REPORT_NS]
            if self._events:
                moments.append(self._events[0][0])
            if wake is not None:
                moments.append(max(wake, self.now))
            moment = min(moments)
            if moment > until:
                break
            self._pass(moment)
            if self._events and self._events[0][0] <= moment:
                self.tell(heapq.heappop(self._events)[2])
            elif self._reported + REPORT_NS <= moment:
                self._report()
            else:
                self.tell(Tick())
        self._pass(until)

    def tell(self, event: Event) -> list[Command]:
        """Passes an event to the dispatcher, and carries out its commands."""
        if isinstance(event, SessionMoved) and not self._moved(event):
            return []
        commands = self.asked(event)
        for command in commands:
            match command:
                case StartSession():
                    self._start(command)
                case CloseSessions():
                    self._later(_ANSWER_NS, SessionsClosed(command.agent, command.sessions))
                    for session in command.sessions:
                        self._closed(session)
                case Reject():
                    self.rejected.append(command)
                    self._running[command.request].over = True
                    del self._running[command.request]
                case _:
                    raise AssertionError(command)
        return commands

    def asked(self, event: Event) -> list[Command]:
        """Lets the dispatcher handle an event; returns its commands."""
        return self.dispatcher.handle(event, self.now)

    # ---- state ----

    def on(self, chain: str) -> list[Served]:
        """Returns the requests whose sessions are on a chain."""
        return [each for each in self._running.values() if each.chain == chain]

    def in_use(self) -> list[str]:
        """Returns the chains that hold sessions."""
        return [each.chain_id for each in self.chains if self.on(each.chain_id)]

    def tokens(self, chain: str) -> int:
        """Returns the tokens cached by a chain, including sessions on their way to it."""
        coming = sum(each.tokens for each, to in self._arriving.values() if to == chain)
        return coming + sum(each.tokens for each in self.on(chain))

    def mean_in_use(self) -> float:
        """Returns the time average of the number of chains that hold sessions."""
        return self.chain_ns / max(1, self.now)

    # ---- private ----

    def _start(self, command: StartSession) -> None:
        served = self._running[command.request]
        if command.moves is None:
            served.session, served.chain = command.session, command.chain_id
            served.starts += 1
            self._by_session[command.session] = served
            return
        assert command.moves == served.session, "only what generates moves"
        limit = self._capacity[command.chain_id]
        held = self.tokens(command.chain_id)
        assert not limit or held + served.tokens <= limit, "a move overfills a chain"
        served.moves += 1
        self.moves.append(
            (self.now, served.request, served.chain, command.chain_id, command.move_mode)
        )
        self._arriving[command.session] = (served, command.chain_id)
        if self.setup.fails(command.session):
            failed = SessionFailed(command.session, None, "INTERNAL", "cannot", retryable=True)
            self._later(self.setup.move_ns, failed)
        else:
            self._later(self.setup.move_ns, SessionMoved(command.session, command.moves))

    def _closed(self, session: SessionId) -> None:
        self._arriving.pop(session, None)
        served = self._by_session.pop(session, None)
        if served is not None and served.session == session:
            served.session, served.chain = None, ""  # it waits, and goes on from its history

    def _moved(self, event: SessionMoved) -> bool:
        found = self._arriving.pop(event.session, None)
        if found is None or found[0].over:
            return False
        served, chain = found
        coordinator = self._hops(served.chain)[0].agent
        served.session, served.chain = event.session, chain
        self._by_session[event.session] = served
        self._later(0, SessionsClosed(coordinator, (event.moved,)))
        return True

    def _report(self) -> None:
        self._reported = self.now
        progress, done = [], []
        for served in list(self._running.values()):
            if served.session is None:
                continue
            served.generated = min(
                float(served.answer), served.generated + REPORT_NS / self.setup.token_ns
            )
            served.first = served.first or self.now - served.arrived
            decode = self.now - served.arrived - served.first
            each = SessionProgress(served.request, int(served.generated), served.first, decode)
            if served.generated >= served.answer:
                done.append((served, each))
            else:
                progress.append(each)
        if progress:
            self.tell(SessionsProgressed(tuple(progress)))
        for served, each in done:
            served.over, served.chain = True, ""
            del self._running[served.request]
            self.tell(RequestCompleted(served.request, each))

    def _later(self, after: Nanoseconds, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + after, self._count, event))

    def _pass(self, moment: Nanoseconds) -> None:
        if moment > self.now:
            used = {served.chain for served in self._running.values()} - {""}
            self.chain_ns += len(used) * (moment - self.now)
            self.now = moment

    def _hops(self, chain_id: str) -> tuple[ChainHop, ...]:
        return next(each.hops for each in self.chains if each.chain_id == chain_id)
