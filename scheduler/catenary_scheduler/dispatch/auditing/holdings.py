"""What is compared: the book, and what agents and gateways say, each at one moment."""

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
    """All an agent holds.

    Attributes:
        batches: Queued, running, or computed and not yet sent on.
        sessions: Each with the blocks it is in here; one block is one slot.
        passed_on: Sessions of which the next agent of their ring has been sent rows.
        leads: What sessions become whose moves are led here.
        partitions: That are loaded.
    """

    batches: Set[BatchId] = frozenset()
    sessions: Mapping[SessionId, tuple[ChainHop, ...]] = field(default_factory=dict)
    passed_on: Set[SessionId] = frozenset()
    leads: Set[SessionId] = frozenset()
    partitions: Set[PartitionKey] = frozenset()


@dataclass(frozen=True, slots=True)
class ExpectedSession:
    """A start whose tokens a gateway takes.

    Attributes:
        session: Which.
        sent_ago_ns: Since its opening, or the order to move to it, left the gateway; None: it has
            not yet.
    """

    session: SessionId
    sent_ago_ns: Nanoseconds | None


@dataclass(frozen=True, slots=True)
class GatewayRequests:
    """Every request a gateway waits for, by number, with its starts if it generates."""

    requests: Mapping[int, tuple[ExpectedSession, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerHoldings:
    """What a scheduler believes.

    Attributes:
        sessions: All that are known or have slots.
        split: Those of them whose prompts are run on another ring than the rest.
        followed: Batches that requests wait for.
        booked: Batches with a booking that no request waits for, and the agents that have yet to
            compute them.
        in_flight: Batches that count as under way.
        requests: Those that wait or are being worked on.
        open: Those that count as open at a gateway.
        agents: That are connected.
        gateways: That are known, connected or not.
        hosted: Partitions that count as loaded.
        first_id: Batches from here on are our own; lower ones a predecessor's.
        settled: Whoever could claim something of a predecessor had the time.
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
