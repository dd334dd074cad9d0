"""Finds where the book and the reports of agents and gateways differ.

A difference counts only if the book said the same when agents and gateways were asked and when
their answers had arrived: an answer does not cover what was ordered in between. Streams keep their
order, so an answer comes behind all that was sent before it, and is given after all that was
ordered before the question. Only frames (from gateways to agents and between agents) may still be
in flight; see `Auditor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from catenary_scheduler.dispatch.auditing.holdings import (
    AgentHoldings,
    ExpectedSession,
    GatewayRequests,
    SchedulerHoldings,
)
from catenary_scheduler.dispatch.chained.sessions.views import BookedSession
from catenary_scheduler.dispatch.chained.states import SessionState
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    Nanoseconds,
    PartitionKey,
    RequestId,
    SessionId,
)
from catenary_services.domain.plan import ChainHop

LeakKind = Literal[
    "slots_unheld",
    "session_lost",
    "start_lost",
    "move_lost",
    "move_unheard",
    "session_orphan",
    "slots_differ",
    "batch_orphan",
    "batch_unheld",
    "batch_forgotten",
    "request_unwanted",
    "gateway_gone",
    "request_forgotten",
    "partition_unhosted",
]
"""Kinds of leaks; `docs/audits.md` explains each and how it is repaired."""


@dataclass(frozen=True, slots=True)
class Leak:
    """A reservation that nobody holds, or something held that is not reserved.

    Two leaks are equal if they concern the same thing; `hops` and `source` only serve its repair.
    """

    kind: LeakKind
    agent: AgentId | None = None
    session: SessionId | None = None
    batch: BatchId | None = None
    request: RequestId | None = None
    partition: PartitionKey | None = None
    hops: tuple[ChainHop, ...] = ()
    source: SessionId | None = None

    @property
    def facts(self) -> dict[str, str]:
        """Returns what the leak is about, for the log."""
        named = {
            "agent": self.agent,
            "session": self.session,
            "batch": self.batch,
            "request": self.request,
            "partition": self.partition,
            "moved_from": self.source,
        }
        return {name: str(value) for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AuditAnswers:
    """The answers to one question.

    Attributes:
        agents: Holdings of the agents that answered.
        gateways: Requests of the gateways that answered.
        grace_ns: A frame sent this long ago has arrived, or is lost.
    """

    agents: Mapping[AgentId, AgentHoldings]
    gateways: Mapping[GatewayId, GatewayRequests]
    grace_ns: Nanoseconds

    def expected(self, request: RequestId | None) -> dict[SessionId, ExpectedSession] | None:
        """Returns the starts that a gateway expects for a request; None if it does not say."""
        wants = self.gateways.get(request.gateway) if request is not None else None
        if wants is None or request is None or request.number not in wants.requests:
            return None
        return {each.session: each for each in wants.requests[request.number]}

    def knows_any(self, agents: set[AgentId], session: SessionId) -> bool:
        """True if one of these agents has a session, or leads the move to it, or did not answer."""
        for agent in agents:
            said = self.agents.get(agent)
            if said is None or session in said.sessions or session in said.leads:
                return True
        return False


def suspicions(
    before: SchedulerHoldings, now: SchedulerHoldings, said: AuditAnswers
) -> Iterator[Leak]:
    """Yields every difference.

    Args:
        before: The book when the question was asked.
        now: The book when the answers have arrived.
        said: The answers.
    """
    for session, claim in now.sessions.items():
        asked = before.sessions.get(session)
        if asked is not None and asked.state == claim.state:
            yield from _booked(asked, claim, now, said)
    for agent, held in said.agents.items():
        if agent not in now.agents:
            continue  # the agent is gone, and all it held with it
        yield from _held(agent, held, before, now)
    yield from _batches(before, now, said)
    yield from _requests(before, now, said)


# ---- sessions ----


def _booked(
    asked: BookedSession, claim: BookedSession, now: SchedulerHoldings, said: AuditAnswers
) -> Iterator[Leak]:
    """Yields reservations of a session that nobody holds, or that are not wanted where they are."""
    if claim.state is SessionState.DELIVERING:
        return  # its gateway is waited for, and only for a while
    if claim.state in (SessionState.CLOSING, SessionState.UNCLAIMED):
        yield from _unheld(asked, claim, said)
        return
    expected = said.expected(claim.request)
    if expected is None:
        return  # if it is not wanted any more, its request is the leak
    if claim.state is SessionState.MIGRATING_IN:
        yield from _moving(claim, expected, said)
    elif claim.session not in expected:
        if not _moved_on(claim.session, now, expected):
            yield Leak("start_lost", session=claim.session, request=claim.request)
    elif claim.state is SessionState.STARTING:
        if _is_lost(claim, expected[claim.session], said):
            yield Leak("start_lost", session=claim.session, request=claim.request)
        else:
            yield from _broken_off(claim, now, said)
    else:
        yield from _running(asked, claim, said)


def _unheld(asked: BookedSession, claim: BookedSession, said: AuditAnswers) -> Iterator[Leak]:
    session, told = claim.session, None
    for agent, _, _ in claim.holds:
        held = said.agents.get(agent)
        if held is None or session in held.sessions or agent == told:
            continue
        if any(holder == agent for holder, _, _ in asked.holds):
            told = agent
            yield Leak("slots_unheld", agent, session)


def _running(asked: BookedSession, claim: BookedSession, said: AuditAnswers) -> Iterator[Leak]:
    """Yields a session with tokens that is not on every agent of its ring, where it must be."""
    for leak in _unheld(asked, claim, said):
        if leak.agent in claim.ring:
            yield Leak("session_lost", leak.agent, claim.session, request=claim.request)
            return  # it is started again, whichever other agents lack it
        yield leak


def _is_lost(claim: BookedSession, start: ExpectedSession, said: AuditAnswers) -> bool:
    """True if its opening was sent a while ago and arrived nowhere."""
    if start.sent_ago_ns is None or start.sent_ago_ns < said.grace_ns:
        return False
    everywhere = {agent for agent, _, _ in claim.holds} | set(claim.ring)
    return not said.knows_any(everywhere, claim.session)


def _broken_off(claim: BookedSession, now: SchedulerHoldings, said: AuditAnswers) -> Iterator[Leak]:
    """Yields a session that an agent of its ring lacks although it must have been there.

    Either the agent before passed it on, or the agent after has it.
    """
    session = claim.session
    for agent, following in pairwise(claim.ring):
        here, there = said.agents.get(agent), said.agents.get(following)
        if here is None or there is None:
            continue
        lacking = None
        if session in here.passed_on and session not in there.sessions:
            lacking = following
        elif session in there.sessions and session not in here.sessions:
            # In a split phase the prompt's agents release sessions that the others hold already.
            lacking = agent if session not in now.split else None
        if lacking is not None:
            yield Leak("session_lost", lacking, session, request=claim.request)
            return


def _moving(
    claim: BookedSession, expected: dict[SessionId, ExpectedSession], said: AuditAnswers
) -> Iterator[Leak]:
    source, old_ring = claim.source or (claim.session, ())
    start = expected.get(claim.session)
    leak = Leak("move_lost", session=claim.session, request=claim.request, source=source)
    if start is None:
        yield leak
    elif source not in expected:  # its tokens come from there, which nobody reported
        yield Leak("move_unheard", session=claim.session, request=claim.request, source=source)
    elif start.sent_ago_ns is not None and start.sent_ago_ns >= said.grace_ns:
        everywhere = {agent for agent, _, _ in claim.holds} | set(claim.ring) | set(old_ring)
        if not said.knows_any(everywhere, claim.session):
            yield leak


def _moved_on(
    session: SessionId, now: SchedulerHoldings, expected: dict[SessionId, ExpectedSession]
) -> bool:
    """True if the tokens of a session come from its successor."""
    arriving = [now.sessions[each] for each in expected if each in now.sessions]
    return any(each.source is not None and each.source[0] == session for each in arriving)


def _held(
    agent: AgentId, held: AgentHoldings, before: SchedulerHoldings, now: SchedulerHoldings
) -> Iterator[Leak]:
    """Yields what an agent holds and the book lacks, or has less of."""
    for session, hops in held.sessions.items():
        asked, claim = before.sessions.get(session), now.sessions.get(session)
        if asked is None and claim is None:
            yield Leak("session_orphan", agent, session, hops=hops)
        elif asked is not None and claim is not None and asked.holds == claim.holds:
            booked = [(where, slots) for holder, where, slots in claim.holds if holder == agent]
            if not booked:
                yield Leak("session_orphan", agent, session, hops=hops)
            elif sorted(booked) != sorted((hop.partition, hop.blocks) for hop in hops):
                yield Leak("slots_differ", agent, session, hops=hops)
    for batch in held.batches:
        is_known = any(batch in facts.followed or batch in facts.booked for facts in (before, now))
        if not is_known and (batch >= now.first_id or now.settled):
            yield Leak("batch_orphan", agent, batch=batch)
    for partition in now.hosted.get(agent, frozenset()) & before.hosted.get(agent, frozenset()):
        if partition not in held.partitions:
            yield Leak("partition_unhosted", agent, partition=partition)


# ---- batches and requests ----


def _batches(
    before: SchedulerHoldings, now: SchedulerHoldings, said: AuditAnswers
) -> Iterator[Leak]:
    for batch, agents in now.booked.items():
        if batch not in before.booked or not (batch >= now.first_id or now.settled):
            continue
        if not any(_may_hold(agent, batch, now, said) for agent in agents):
            yield Leak("batch_unheld", batch=batch)
    for batch in now.in_flight & before.in_flight:
        known = any(batch in facts.followed or batch in facts.booked for facts in (before, now))
        if not known:
            yield Leak("batch_forgotten", batch=batch)


def _may_hold(agent: AgentId, batch: BatchId, now: SchedulerHoldings, said: AuditAnswers) -> bool:
    held = said.agents.get(agent)
    return batch in held.batches if held is not None else agent in now.agents


def _requests(
    before: SchedulerHoldings, now: SchedulerHoldings, said: AuditAnswers
) -> Iterator[Leak]:
    for request in now.requests & before.requests:
        wants = said.gateways.get(request.gateway)
        if request.gateway not in now.gateways:
            yield Leak("gateway_gone", request=request)
        elif wants is not None and request.number not in wants.requests:
            yield Leak("request_unwanted", request=request)
    for request in (now.open & before.open) - now.requests - before.requests:
        yield Leak("request_forgotten", request=request)
