"""Cost of one placement under objectives: 100 workers of 30 sessions, 25 requests a second.

Sessions are spread over the workers at all stages of their answers and report every 100 ms, as
gateways do. Each one that ends is replaced, so the load stays. A decision is the dispatcher's work
for one arrival between the event and the command: find a worker, reserve its slots, predict. An
arrival is `handle` as a whole. The paper allows its scheduler 50 ms for a heartbeat's placements;
here that limit is for all events of 100 ms together, reports included. Times are CPU time of the
thread.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from benchmarks.virtual_time import decision_us
from catenary_lab.limits import Figure, at_least, at_most
from catenary_scheduler.book import COMPILED
from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    CloseSessions,
    Command,
    PlanActivated,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
    StartSession,
)
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import Agent, CacheCapacity, Chain, ChainHop, ModelPlan, Plan

MS = NANOSECONDS_PER_MILLISECOND
LIMIT_P50_US = 100.0
LIMIT_HEARTBEAT_MS = 50.0
WORKERS, SESSIONS, RATE_PER_S = 100, 30, 25
SLOTS = 64
HEARTBEAT_NS = 100 * MS
STEP_MS = 68
MODEL = ModelKey("bench", "1")
OBJECTIVES = TokenObjectives(1600 * MS, 75 * MS)
LINES = LatencyLines(0.337e6, 32.9e6, 200.0, 0.1875e6, 54.8e6, 54.9e6)
CACHE_TOKENS = 150_000.0


@dataclass(slots=True)
class Running:
    """A session, as its gateway sees it."""

    arrived: int
    placed: int
    prompt: int
    answer: int
    generated: int = 0


class Cluster:
    """A dispatcher in virtual time, with the real times it took."""

    def __init__(self, seed: int = 7) -> None:
        self.random = random.Random(seed)
        limits = ChainedConfig(max_queued=10_000)
        self.dispatcher = ChainedDispatcher(limits, policy="slo", stopwatch=time.thread_time_ns)
        part = PartitionKey(MODEL, 0, 1)
        chains, caches = [], []
        for number in range(WORKERS):
            agent = AgentId(f"a{number}")
            self.dispatcher.handle(AgentJoined(Agent(agent, "x", ServerId(agent), 1, 1)), 0)
            hops = (ChainHop(agent, part, 0, 1),)
            chains.append(
                Chain(f"c{number}", hops, SLOTS, 1, lines=LINES, cache_tokens=CACHE_TOKENS)
            )
            caches.append(CacheCapacity(agent, part, SLOTS))
        served = ModelPlan(
            MODEL, 10**12, (), chains=tuple(chains), caches=tuple(caches), objectives=OBJECTIVES
        )
        self.dispatcher.handle(PlanActivated(Plan(PlanId("bench"), (served,))), 0)
        self.now = 0
        self.count = 0
        self.waiting: dict[RequestId, Running] = {}
        self.running: dict[RequestId, Running] = {}
        self.arrival_us: list[float] = []
        self.heartbeat_ms: list[float] = []

    def arrive(self) -> None:
        """Lets a request arrive; lengths of answers keep the number of sessions constant."""
        self.count += 1
        request = RequestId(GatewayId("g"), self.count)
        prompt = max(2, int(self.random.lognormvariate(4.2, 1.3)))
        answer = self.random.randrange(2, 2 * WORKERS * SESSIONS * 1000 // (RATE_PER_S * STEP_MS))
        self.waiting[request] = Running(self.now, self.now, min(prompt, 2500), answer)
        event = SessionRequested(
            request, MODEL, self.waiting[request].prompt, 4096, 1 << 60, arrived_ns=self.now
        )
        before = time.thread_time_ns()
        commands = self.dispatcher.handle(event, self.now)
        self.dispatcher.next_wakeup()
        self.arrival_us.append((time.thread_time_ns() - before) / 1000)
        self.obey(commands)

    def obey(self, commands: list[Command]) -> None:
        """Carries out commands: starts sessions, and lets agents close others."""
        for command in commands:
            if isinstance(command, StartSession):
                session = self.waiting.pop(command.request)
                session.placed = self.now
                self.running[command.request] = session
            elif isinstance(command, CloseSessions):
                closed = SessionsClosed(command.agent, command.sessions)
                self.obey(self.dispatcher.handle(closed, self.now))

    def progress(self, request: RequestId, session: Running) -> SessionProgress:
        """Returns the report of a session's gateway."""
        first = session.placed + 100 * MS - session.arrived
        return SessionProgress(
            request, session.generated, first, (session.generated - 1) * STEP_MS * MS
        )

    def heartbeat(self) -> None:
        """Lets 100 ms pass: sessions get tokens, some end, and all are reported."""
        self.now += HEARTBEAT_NS
        ended, found = [], []
        for request, session in self.running.items():
            elapsed = self.now - session.placed - 100 * MS
            if elapsed < 0:
                continue
            session.generated = min(session.answer, 1 + elapsed // (STEP_MS * MS))
            if session.generated == session.answer:
                ended.append(request)
            else:
                found.append(self.progress(request, session))
        for request in ended:
            progress = self.progress(request, self.running.pop(request))
            self.obey(self.dispatcher.handle(RequestCompleted(request, progress), self.now))
        self.obey(self.dispatcher.handle(SessionsProgressed(tuple(found)), self.now))

    def fill(self) -> None:
        """Starts as many sessions as the load has."""
        while self.count < WORKERS * SESSIONS:
            for _ in range(RATE_PER_S):
                self.arrive()
            self.heartbeat()
        self.arrival_us.clear()
        self.dispatcher.take_decision_times()

    def go(self, seconds: int) -> None:
        """Serves for `seconds` at the rate at which sessions end."""
        for _ in range(10 * seconds):
            spent = time.thread_time_ns()
            self.heartbeat()
            gap = HEARTBEAT_NS * 10 // RATE_PER_S
            arrivals = self.random.choice((2, 3))
            for number in range(arrivals):
                self.now += gap // arrivals if number else 0
                self.arrive()
            self.heartbeat_ms.append((time.thread_time_ns() - spent) / 1e6)


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    cluster = Cluster()
    cluster.fill()
    cluster.go(10 if quick else 60)
    p50, p99 = decision_us(cluster.dispatcher)
    sessions = len(cluster.running) / WORKERS
    return [
        at_least("compiled modules in use", float(COMPILED), "", 1),
        at_most("placement decision p50, 100 workers", p50, "us", LIMIT_P50_US),
        at_most("placement decision p99", p99, "us"),
        at_most("arrival p50, all of `handle`", statistics.median(cluster.arrival_us), "us"),
        at_most(
            "100 ms of events with reports (paper: 50 ms a heartbeat)",
            statistics.median(cluster.heartbeat_ms),
            "ms",
            LIMIT_HEARTBEAT_MS,
        ),
        at_most("sessions a worker", sessions, ""),
    ]
