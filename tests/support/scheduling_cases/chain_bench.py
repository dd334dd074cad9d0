"""A chained dispatcher, a clock and short names, for tests that go step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from catenary_lab.policies import policy_named
from catenary_scheduler.book import Book, Reservation
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.chained.queues.wait_queue import PolicyFactory
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    AgentJoined,
    CloseSessions,
    Command,
    Event,
    PlanActivated,
    Reject,
    RequestCompleted,
    SessionRequested,
    SessionsClosed,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
    SessionId,
)
from catenary_services.domain.plan import Agent, CacheCapacity, Chain, ChainHop, ModelPlan, Plan

MS = 1_000_000
LLAMA = ModelKey("llama", "1")
C = TypeVar("C")


def hop(agent: str, first: int, last: int, entry: int | None = None) -> ChainHop:
    """Returns a hop through what is hosted, from block `entry` on."""
    start = first if entry is None else entry
    return ChainHop(AgentId(agent), PartitionKey(LLAMA, first, last), start, last)


def chain(name: str, capacity: int, service_ms: float, *hops: ChainHop) -> Chain:
    """Returns a chain; without hops, the whole model of six blocks on the agent of that name."""
    return Chain(name, hops or (hop(name, 0, 6),), capacity, round(service_ms * MS))


def plan(*chains: Chain, session_tokens: int = 0, **slots: int) -> Plan:
    """Returns a plan; `slots` are block slots of what an agent hosts, if not what chains ask."""
    caches = tuple(
        CacheCapacity(each.agent, each.partition, slots[each.agent])
        for each in dict.fromkeys(h for c in chains for h in c.hops)
        if each.agent in slots
    )
    model = ModelPlan(LLAMA, 10**9, (), True, chains, caches, session_tokens)
    return Plan(PlanId("p"), (model,))


class ChainBench:
    """Times are milliseconds; requests are numbered from 1, agents are letters."""

    def __init__(
        self,
        active: Plan | None,
        config: ChainedConfig | None = None,
        *,
        agents: str = "abcdef",
        policy: str | PolicyFactory = "jffc",
        epoch: int = 1,
        random_below: Callable[[int], int] | None = None,
        stopwatch: Callable[[], int] | None = None,
    ) -> None:
        if isinstance(policy, str) and random_below is not None:
            policy = policy_named(policy, random_below)
        self.book = Book()
        self.availability = Availability(everything_loaded=True)
        self.dispatcher = ChainedDispatcher(
            replace(config or ChainedConfig(), checked=True),
            self.book,
            availability=self.availability,
            policy=policy,
            first_session=epoch << 40,
            stopwatch=stopwatch,
        )
        self.number = 0
        for agent in agents:
            self.join(0, agent)
        if active is not None:
            self.tell(0, PlanActivated(active))

    def tell(self, at_ms: float, event: Event) -> list[Command]:
        return self.dispatcher.handle(event, round(at_ms * MS))

    def tick(self, at_ms: float) -> list[Command]:
        return self.tell(at_ms, Tick())

    def join(self, at_ms: float, agent: str) -> list[Command]:
        joined = AgentJoined(Agent(AgentId(agent), "x", ServerId(agent), 1, 1))
        return self.tell(at_ms, joined)

    def drain(self, at_ms: float, agent: str) -> list[Command]:
        self.availability.impair(AgentId(agent), Impairment.DRAINING)
        return self.tick(at_ms)

    def take_back(self, at_ms: float, agent: str) -> list[Command]:
        self.availability.clear(AgentId(agent), Impairment.DRAINING)
        return self.tick(at_ms)

    def ask(
        self,
        at_ms: float,
        budget_ms: float = 1000,
        *,
        priority: int = 0,
        tokens: int = 10,
        in_flight: AdoptedSession | None = None,
        number: int = 0,
    ) -> list[Command]:
        self.number = number or self.number + 1
        deadline = round((at_ms + budget_ms) * MS)
        request = RequestId(GatewayId("g"), self.number)
        event = SessionRequested(request, LLAMA, 5, tokens, deadline, priority, in_flight)
        return self.tell(at_ms, event)

    def start(self, at_ms: float, budget_ms: float = 1000) -> StartSession:
        """Asks, and returns the session that starts at once."""
        return only(self.ask(at_ms, budget_ms), StartSession)

    def closed(self, at_ms: float, agent: str, *sessions: StartSession) -> list[Command]:
        ids = tuple(each.session for each in sessions)
        return self.tell(at_ms, SessionsClosed(AgentId(agent), ids))

    def finished(self, at_ms: float, session: StartSession) -> list[Command]:
        return self.tell(at_ms, RequestCompleted(session.request))

    def end(self, at_ms: float, session: StartSession) -> list[Command]:
        """Every agent says the session is over, then the gateway has everything."""
        commands = []
        for each in reversed(session.hops):
            commands += self.closed(at_ms, each.agent, session)
        return commands + self.finished(at_ms, session)

    def figure(self, name: str) -> int:
        return self.dispatcher.statistics()[name]

    def booked(self) -> dict[str, int]:
        """Returns the slots in use by agent."""
        found: dict[str, int] = {}
        for record in self.dispatcher.snapshot():
            agent = record.resource.split("/")[1]
            found[agent] = found.get(agent, 0) + record.slots
        return found


def only(commands: list[Command], kind: type[C]) -> C:
    """Returns the one command, which must be of this kind."""
    (command,) = commands
    assert isinstance(command, kind)
    return command


def started(commands: list[Command]) -> list[tuple[int, str]]:
    """Returns request numbers and chains of the sessions that start."""
    return [(c.request.number, c.chain_id) for c in commands if isinstance(c, StartSession)]


def closes(commands: list[Command]) -> dict[str, tuple[SessionId, ...]]:
    """Returns what each agent is told to close."""
    return {c.agent: c.sessions for c in commands if isinstance(c, CloseSessions)}


def rejects(commands: list[Command]) -> list[tuple[int, str]]:
    """Returns request numbers and reasons of refusals."""
    return [(c.request.number, c.reason) for c in commands if isinstance(c, Reject)]


def adopted(session: StartSession) -> AdoptedSession:
    """Returns a session as a gateway or an agent names it to a new scheduler."""
    return AdoptedSession(session.session, session.hops)


def slots_of(records: list[Reservation], session: StartSession) -> dict[str, int]:
    """Returns what a session has booked, by agent."""
    mine = [record for record in records if record.session == session.session]
    return {record.resource.split("/")[1]: record.slots for record in mine}
