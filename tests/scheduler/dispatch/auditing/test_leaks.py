"""The auditor against the definitions of leaks word for word, on tiny random clusters."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.dispatch.auditing import (
    AgentHoldings,
    Auditor,
    ExpectedSession,
    GatewayRequests,
    Leak,
    SchedulerHoldings,
    remedy_of,
)
from catenary_scheduler.dispatch.auditing.auditor import key_of
from catenary_scheduler.dispatch.chained.sessions.views import BookedSession
from catenary_scheduler.dispatch.chained.states import SessionState
from catenary_scheduler.dispatch.events import (
    BatchFailed,
    CancelBatch,
    RequestCancelled,
    SessionFailed,
    SessionMoved,
    SessionsClosed,
    SessionsFound,
)
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    PartitionKey,
    RequestId,
    SessionId,
)
from catenary_services.domain.plan import ChainHop

GRACE = 3
A, B = AgentId("a"), AgentId("b")
G = GatewayId("g")
MODEL = ModelKey("m", "1")
PARTS = {A: PartitionKey(MODEL, 0, 2), B: PartitionKey(MODEL, 2, 4)}
HOPS = {
    agent: ChainHop(agent, PARTS[agent], *((0, 2) if agent == A else (2, 4))) for agent in PARTS
}
SHORT = {agent: replace(hop, first_block=hop.first_block + 1) for agent, hop in HOPS.items()}
SESSIONS = [SessionId(number) for number in (10, 11)]
PURPOSES = (
    SessionState.STARTING,
    SessionState.DECODING,
    SessionState.DELIVERING,
    SessionState.MIGRATING_IN,
    SessionState.CLOSING,
    SessionState.UNCLAIMED,
)
BATCHES = [BatchId(number) for number in (20, 21)]
EVERYTHING = GatewayRequests({1: (), 2: ()})
REQUESTS = [RequestId(G, 1), RequestId(GatewayId("gone"), 2)]


def some(chance: random.Random, items: Iterable[Any]) -> frozenset[Any]:
    return frozenset(each for each in sorted(items) if chance.random() < 0.5)


def claims(chance: random.Random) -> dict[SessionId, BookedSession]:
    found = {}
    for session in some(chance, SESSIONS):
        state = chance.choice(PURPOSES)
        holds = tuple((agent, PARTS[agent], 2) for agent in sorted(some(chance, [A, B])))
        wanted = state in (
            SessionState.STARTING,
            SessionState.DECODING,
            SessionState.DELIVERING,
            SessionState.MIGRATING_IN,
        )
        request = chance.choice(REQUESTS) if wanted else None
        source = (chance.choice(SESSIONS), (A, B)) if state is SessionState.MIGRATING_IN else None
        found[session] = BookedSession(session, request, state, (A, B), holds, source)
    return found


def a_book(chance: random.Random) -> SchedulerHoldings:
    booked = some(chance, BATCHES)
    return SchedulerHoldings(
        sessions=claims(chance),
        split=some(chance, SESSIONS),
        followed=some(chance, BATCHES) - booked,
        booked={batch: tuple(sorted(some(chance, [A, B]))) for batch in sorted(booked)},
        in_flight=some(chance, BATCHES),
        requests=some(chance, REQUESTS),
        open=some(chance, REQUESTS),
        agents=some(chance, [A, B]),
        gateways=some(chance, [G]),
        hosted={agent: some(chance, [PARTS[agent]]) for agent in PARTS},
        first_id=chance.choice([0, 21, 99]),
        settled=chance.random() < 0.5,
    )


def holdings(chance: random.Random, agent: AgentId) -> AgentHoldings:
    sessions = some(chance, SESSIONS)
    return AgentHoldings(
        batches=some(chance, BATCHES),
        sessions={s: (chance.choice([HOPS[agent], SHORT[agent]]),) for s in sorted(sessions)},
        passed_on=some(chance, sessions),
        leads=some(chance, SESSIONS),
        partitions=some(chance, [PARTS[agent]]),
    )


def wants(chance: random.Random) -> GatewayRequests:
    return GatewayRequests(
        {
            number: tuple(
                ExpectedSession(session, chance.choice([None, 1, GRACE, 9]))
                for session in sorted(some(chance, SESSIONS))
            )
            for number in sorted(some(chance, [1, 2]))
        }
    )


Said = tuple[dict[AgentId, AgentHoldings], dict[GatewayId, GatewayRequests]]


def answers(chance: random.Random) -> Said:
    agents = {agent: holdings(chance, agent) for agent in sorted(some(chance, [A, A, B, B]))}
    return agents, {G: wants(chance)} if chance.random() < 0.7 else {}


def literal(before: SchedulerHoldings, now: SchedulerHoldings, said: Said) -> Iterator[Leak]:
    """Every leak by its definition: one loop over everything, no short cuts."""
    agents = {a: held for a, held in said[0].items() if a in before.agents}
    gateways = said[1]

    def believed(claim: BookedSession) -> dict[SessionId, ExpectedSession] | None:
        if claim.request is None or claim.request.gateway not in gateways:
            return None
        starts = gateways[claim.request.gateway].requests.get(claim.request.number)
        return None if starts is None else {each.session: each for each in starts}

    def nowhere(session: SessionId) -> bool:
        """All agents that might have it have answered, and none does."""
        return all(
            agent in agents
            and session not in agents[agent].sessions
            and session not in agents[agent].leads
            for agent in (A, B)
        )

    def lost_on_its_way(start: ExpectedSession, session: SessionId) -> bool:
        return start.sent_ago_ns is not None and start.sent_ago_ns >= GRACE and nowhere(session)

    for session in SESSIONS:
        old, new = before.sessions.get(session), now.sessions.get(session)
        if old is None or new is None or old.state != new.state:
            continue
        unheld = [
            agent
            for agent in (A, B)
            if agent in agents
            and session not in agents[agent].sessions
            and any(h[0] == agent for h in old.holds)
            and any(h[0] == agent for h in new.holds)
        ]
        starts = believed(new)
        if new.state in (SessionState.CLOSING, SessionState.UNCLAIMED):
            for agent in unheld:
                yield Leak("slots_unheld", agent, session)
        if new.state is SessionState.DELIVERING or starts is None:
            continue
        if new.state is SessionState.MIGRATING_IN:
            source = new.source[0] if new.source else session
            if session not in starts:
                yield Leak("move_lost", session=session, request=new.request, source=source)
            elif source not in starts:
                yield Leak("move_unheard", session=session, request=new.request, source=source)
            elif lost_on_its_way(starts[session], session):
                yield Leak("move_lost", session=session, request=new.request, source=source)
            continue
        if session not in starts:
            becomes = [
                each
                for each in starts
                if each in now.sessions and (s := now.sessions[each].source) and s[0] == session
            ]
            if not becomes:
                yield Leak("start_lost", session=session, request=new.request)
        elif new.state is SessionState.STARTING and lost_on_its_way(starts[session], session):
            yield Leak("start_lost", session=session, request=new.request)
        elif new.state is SessionState.STARTING and A in agents and B in agents:
            first, second = session in agents[A].sessions, session in agents[B].sessions
            if session in agents[A].passed_on and not second:
                yield Leak("session_lost", B, session, request=new.request)
            elif second and not first and session not in now.split:
                yield Leak("session_lost", A, session, request=new.request)
        elif new.state is SessionState.DECODING and unheld:
            yield Leak("session_lost", unheld[0], session, request=new.request)
    for agent, held in agents.items():
        if agent not in now.agents:
            continue
        for session, hops in held.sessions.items():
            old, new = before.sessions.get(session), now.sessions.get(session)
            mine = [(h[1], h[2]) for h in new.holds if h[0] == agent] if new else []
            if old is None and new is None:
                yield Leak("session_orphan", agent, session)
            elif old and new and old.holds == new.holds:
                if not mine:
                    yield Leak("session_orphan", agent, session)
                elif mine != [(hop.partition, hop.blocks) for hop in hops]:
                    yield Leak("slots_differ", agent, session)
        for batch in held.batches:
            known = {*before.followed, *before.booked, *now.followed, *now.booked}
            if batch not in known and (batch >= now.first_id or now.settled):
                yield Leak("batch_orphan", agent, batch=batch)
        for partition in now.hosted[agent] & before.hosted[agent]:
            if partition not in held.partitions:
                yield Leak("partition_unhosted", agent, partition=partition)
    for batch in BATCHES:
        if batch in before.booked and batch in now.booked:
            held_by = [
                a
                for a in now.booked[batch]
                if (batch in agents[a].batches if a in agents else a in now.agents)
            ]
            if not held_by and (batch >= now.first_id or now.settled):
                yield Leak("batch_unheld", batch=batch)
        known = {*before.followed, *before.booked, *now.followed, *now.booked}
        if batch in before.in_flight & now.in_flight and batch not in known:
            yield Leak("batch_forgotten", batch=batch)
    for request in REQUESTS:
        if request in before.requests and request in now.requests:
            if request.gateway not in now.gateways:
                yield Leak("gateway_gone", request=request)
            elif request.number not in gateways.get(request.gateway, EVERYTHING).requests:
                yield Leak("request_unwanted", request=request)
        is_open = request in before.open and request in now.open
        if is_open and request not in before.requests | now.requests:
            yield Leak("request_forgotten", request=request)


def audit(
    auditor: Auditor, before: SchedulerHoldings, now: SchedulerHoldings, said: Said, at: int
) -> list[Leak]:
    auditor.begin(before)
    for agent, held in said[0].items():
        auditor.agent_says(agent, held)
    for gateway, wanted in said[1].items():
        auditor.gateway_says(gateway, wanted)
    return auditor.end(now, at)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_differs_twice_leaked_by_the_definitions(seed: int) -> None:
    chance = random.Random(seed)
    before, said = a_book(chance), answers(chance)
    now = before if chance.random() < 0.5 else a_book(chance)
    auditor = Auditor(GRACE)
    assert audit(auditor, before, now, said, 0) == []
    found = audit(auditor, before, now, said, GRACE)
    assert {key_of(leak) for leak in found} == {key_of(leak) for leak in literal(before, now, said)}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_only_what_differs_in_a_row_and_long_enough_is_a_leak(seed: int) -> None:
    chance = random.Random(seed)
    book, said, later = a_book(chance), answers(chance), answers(chance)
    auditor = Auditor(GRACE)
    audit(auditor, book, book, said, 0)
    assert audit(auditor, book, book, said, GRACE - 1) == []
    between = {key_of(leak) for leak in literal(book, book, later)}
    audit(auditor, book, book, later, GRACE - 1)
    found = audit(auditor, book, book, said, 2 * GRACE)
    assert {key_of(leak) for leak in found} <= between


def test_what_is_mended_is_told_once_it_is_not_found_again() -> None:
    book = SchedulerHoldings(requests=frozenset(REQUESTS[:1]), gateways=frozenset({G}))
    auditor = Auditor(GRACE)
    said: Said = ({}, {G: GatewayRequests()})
    audit(auditor, book, book, said, 0)
    (leak,) = audit(auditor, book, book, said, GRACE)
    assert leak.facts == {"request": "g/1"}
    assert auditor.mended == []
    empty = replace(book, requests=frozenset())
    assert audit(auditor, empty, empty, said, 2 * GRACE) == []
    assert auditor.mended == [leak]
    assert auditor.audits == 3


def test_an_agent_that_went_away_is_not_believed() -> None:
    book = SchedulerHoldings(agents=frozenset({A}))
    auditor = Auditor(GRACE)
    for moment in (0, GRACE, 2 * GRACE):
        auditor.begin(book)
        assert not auditor.is_complete
        auditor.agent_says(A, AgentHoldings(batches=frozenset(BATCHES)))
        assert auditor.is_complete
        auditor.gone(A)
        assert auditor.end(book, moment) == []


@pytest.mark.parametrize(
    ("leak", "remedy"),
    [
        (Leak("slots_unheld", A, SESSIONS[0]), SessionsClosed),
        (Leak("session_lost", A, SESSIONS[0], request=REQUESTS[0]), SessionFailed),
        (Leak("start_lost", session=SESSIONS[0], request=REQUESTS[0]), SessionFailed),
        (Leak("move_lost", session=SESSIONS[0], source=SESSIONS[1]), SessionFailed),
        (Leak("move_unheard", session=SESSIONS[0], source=SESSIONS[1]), SessionMoved),
        (Leak("session_orphan", A, SESSIONS[0], hops=(HOPS[A],)), SessionsFound),
        (Leak("slots_differ", A, SESSIONS[0], hops=(HOPS[A],)), SessionsFound),
        (Leak("batch_orphan", A, batch=BATCHES[0]), CancelBatch),
        (Leak("batch_unheld", batch=BATCHES[0]), BatchFailed),
        (Leak("request_unwanted", request=REQUESTS[0]), RequestCancelled),
        (Leak("gateway_gone", request=REQUESTS[1]), RequestCancelled),
        (Leak("batch_forgotten", batch=BATCHES[0]), type(None)),
        (Leak("request_forgotten", request=REQUESTS[0]), type(None)),
        (Leak("partition_unhosted", A, partition=PARTS[A]), type(None)),
    ],
)
def test_each_kind_is_mended_by_what_there_is_anyway(leak: Leak, remedy: type) -> None:
    assert isinstance(remedy_of(leak), remedy)
