"""Cost of an audit of the book to the scheduler, and of timelines to a dispatch.

There are 1,000 sessions on 100 agents, four to a chain, and 100 batches. The scheduler takes down
what it believes, asks, reads a hundred answers, takes down what it believes again and compares. All
of that runs between two events of the dispatcher. Times are CPU time of the thread.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict

from catenary_lab.limits import Figure, at_most
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.book import Book
from catenary_scheduler.dispatch import ChainedDispatcher
from catenary_scheduler.dispatch.auditing import (
    Auditor,
    ExpectedSession,
    GatewayRequests,
    SchedulerHoldings,
)
from catenary_scheduler.dispatch.chained.sessions.views import BookedSession
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    DispatchBatch,
    PlanActivated,
    PlannedHop,
    SessionProgress,
    SessionRequested,
    SessionsProgressed,
    StageReported,
)
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.runtime.book_audit import holdings_of
from catenary_scheduler.wire.messages import partition_message
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.plan import Agent, CacheCapacity, Chain, ChainHop, ModelPlan, Plan

LIMIT_AUDIT_MS = 40.0
LIMIT_PART_MS = 20.0
LIMIT_REMEMBER_US = 3.0
AGENTS, HOPS, SESSIONS = 100, 4, 1_000
MODEL = ModelKey("bench", "1")
GATEWAY = GatewayId("g")
_GRACE_NS = 3 * 10**9


def served() -> ChainedDispatcher:
    """Returns a dispatcher with all of its sessions running."""
    book = Book()
    dispatcher = ChainedDispatcher(book=book)
    names = [AgentId(f"a{number:03}") for number in range(AGENTS)]
    chains = []
    for first in range(0, AGENTS, HOPS):
        hops = tuple(
            ChainHop(name, PartitionKey(MODEL, at, at + 1), at, at + 1)
            for at, name in enumerate(names[first : first + HOPS])
        )
        chains.append(Chain(f"c{first}", hops, SESSIONS * HOPS // AGENTS, 10**9))
    caches = tuple(
        CacheCapacity(hop.agent, hop.partition, chain.capacity)
        for chain in chains
        for hop in chain.hops
    )
    model = ModelPlan(MODEL, 10**12, (), chains=tuple(chains), caches=caches)
    for name in names:
        dispatcher.handle(AgentJoined(Agent(name, "x", ServerId(name), 1, 10**9)), 0)
    dispatcher.handle(PlanActivated(Plan(PlanId("bench"), (model,))), 0)
    for number in range(SESSIONS):
        request = RequestId(GATEWAY, number)
        dispatcher.handle(SessionRequested(request, MODEL, 100, 100, 10**12), 0)
        progress = SessionProgress(request, 1, 1, 1)
        dispatcher.handle(SessionsProgressed((progress,)), 0)
    return dispatcher


def facts_of(dispatcher: ChainedDispatcher, agents: frozenset[AgentId]) -> SchedulerHoldings:
    """Returns what the scheduler believes, from a dispatcher."""
    requests = frozenset(dispatcher.open_requests())
    return SchedulerHoldings(
        sessions={claim.session: claim for claim in dispatcher.claims()},
        requests=requests,
        open=requests,
        agents=agents,
        gateways=frozenset((GATEWAY,)),
    )


def answers(claims: list[BookedSession]) -> dict[AgentId, scheduler_pb2.Holdings]:
    """Returns the answers of agents that hold exactly what they should."""
    found: defaultdict[AgentId, scheduler_pb2.Holdings] = defaultdict(scheduler_pb2.Holdings)
    for claim in claims:
        for agent, partition, _ in claim.holds:
            key = partition_message(partition)
            session = found[agent].sessions.add(session_id=claim.session, partition=key)
            session.route.add(
                agent_id=agent, first_block=partition.first_block, last_block=partition.last_block
            )
    return dict(found)


def audit_ms(times: int) -> tuple[float, float]:
    """Returns median milliseconds of an audit without findings: of the whole, of its last part."""
    dispatcher, auditor = served(), Auditor(_GRACE_NS)
    claims = dispatcher.claims()
    said = answers(claims)
    agents = frozenset(said)
    wants = GatewayRequests(
        {
            c.request.number: (ExpectedSession(c.session, 10**10),)
            for c in claims
            if c.request is not None
        }
    )
    taken, last = [], []
    for number in range(times):
        began = time.thread_time_ns()
        auditor.begin(facts_of(dispatcher, agents))
        for agent, message in said.items():
            auditor.agent_says(agent, holdings_of(agent, message))
        auditor.gateway_says(GATEWAY, wants)
        judging = time.thread_time_ns()
        leaks = auditor.end(facts_of(dispatcher, agents), number * _GRACE_NS)
        ended = time.thread_time_ns()
        taken.append((ended - began) / 1e6)
        last.append((ended - judging) / 1e6)
        assert not leaks
    assert len(claims) == SESSIONS
    return statistics.median(taken), statistics.median(last)


def remember_us(batches: int) -> float:
    """Returns the mean microseconds to note a dispatch of three hops, or one of its reports."""
    timelines = Timelines()
    hops = tuple(
        PlannedHop(AgentId(f"a{at}"), PartitionKey(MODEL, at, at + 1), at * 10**6, 10**6)
        for at in range(3)
    )
    commands = [DispatchBatch(BatchId(n), 8, (), hops, n * 10**5) for n in range(batches)]
    reports = [[StageReported(BatchId(n), at, 0, 10**6) for at in range(3)] for n in range(batches)]
    gc.collect()
    gc.freeze()  # what the bench has made is not looked through at the timed code's expense
    try:
        began = time.thread_time_ns()
        for number, command in enumerate(commands):
            timelines.dispatched(command, number * 10**5)
            for report in reports[number]:
                timelines.reported(report)
        return (time.thread_time_ns() - began) / 1e3 / batches / 4
    finally:
        gc.unfreeze()


def figures(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    whole, last = audit_ms(20 if quick else 100)
    return [
        at_most("audit p50, 1,000 sessions on 100 agents", whole, "ms", LIMIT_AUDIT_MS),
        at_most("the longest part of it, between two events", last, "ms", LIMIT_PART_MS),
        at_most(
            "note a dispatch or a report for timelines",
            remember_us(5_000 if quick else 40_000),
            "us",
            LIMIT_REMEMBER_US,
        ),
    ]
