"""The two sides of an audit: the book, and what agents and gateways report, at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from catenary_scheduler.dispatch.chained.sessions.views import BookedSession
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


@dataclass(frozen=True, slots=True)
class AgentHoldings:
    """Everything an agent holds.

    Attributes:
        batches: Batches queued, running, or computed and not yet sent on.
        sessions: Its sessions, each with its blocks here; one block is one slot.
        passed_on: Sessions of which rows were sent to the next agent of their ring.
        leads: Successors of the sessions whose moves this agent leads.
        partitions: The loaded partitions.
    """

    batches: Set[BatchId] = frozenset()
    sessions: Mapping[SessionId, tuple[ChainHop, ...]] = field(default_factory=dict)
    passed_on: Set[SessionId] = frozenset()
    leads: Set[SessionId] = frozenset()
    partitions: Set[PartitionKey] = frozenset()


@dataclass(frozen=True, slots=True)
class ExpectedSession:
    """A start whose tokens a gateway accepts.

    Attributes:
        session: The session.
        sent_ago_ns: Time since its opening, or the order to move to it, left the gateway; None: it
            has not left yet.
    """

    session: SessionId
    sent_ago_ns: Nanoseconds | None


@dataclass(frozen=True, slots=True)
class GatewayRequests:
    """Every request a gateway waits for, by number, with its starts if it generates."""

    requests: Mapping[int, tuple[ExpectedSession, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerHoldings:
    """Everything a scheduler has booked and counts on.

    Attributes:
        sessions: All sessions that are known or have slots.
        split: Those whose prompts run on another ring than the rest.
        followed: Batches that requests wait for.
        booked: Batches with a booking that no request waits for, and the agents that have yet to
            compute them.
        in_flight: Batches that count as in flight.
        requests: Requests that wait or are being worked on.
        open: Requests that count as open at a gateway.
        agents: The connected agents.
        gateways: The known gateways, connected or not.
        hosted: Partitions that count as loaded.
        first_id: The first batch id of this scheduler; lower ones are an earlier scheduler's.
        settled: True if all claims to work of an earlier scheduler have had time to arrive.
    """

    sessions: Mapping[SessionId, BookedSession] = field(default_factory=dict)
    split: Set[SessionId] = frozenset()
    followed: Set[BatchId] = frozenset()
    booked: Mapping[BatchId, tuple[AgentId, ...]] = field(default_factory=dict)
    in_flight: Set[BatchId] = frozenset()
    requests: Set[RequestId] = frozenset()
    open: Set[RequestId] = frozenset()
    agents: Set[AgentId] = frozenset()
    gateways: Set[GatewayId] = frozenset()
    hosted: Mapping[AgentId, Set[PartitionKey]] = field(default_factory=dict)
    first_id: int = 0
    settled: bool = True
