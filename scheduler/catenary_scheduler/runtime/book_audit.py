"""Audits the reservations of one term against agents and gateways, and mends leaks.

`catenary_scheduler.dispatch.auditing` judges. This module sends the questions, reads the answers
and carries out the remedies; everything found is logged once and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.registry import AgentSender, AgentState
from catenary_scheduler.book import Book
from catenary_scheduler.book.book import agents_of
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.dispatch import CombinedDispatcher
from catenary_scheduler.dispatch.auditing import (
    AgentHoldings,
    Auditor,
    ExpectedSession,
    GatewayRequests,
    Leak,
    SchedulerHoldings,
    remedy_of,
)
from catenary_scheduler.dispatch.events import CancelBatch, Event
from catenary_scheduler.inflight.batches import InFlightBatches
from catenary_scheduler.inflight.not_ready_queue import NotReadyQueue
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.wire.messages import cancel_batches_message, partition_of
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    Epoch,
    GatewayId,
    Nanoseconds,
    PartitionKey,
    RequestId,
    SessionId,
)
from catenary_services.domain.plan import ChainHop
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
_ANSWER_TIMEOUT_NS = NANOSECONDS_PER_SECOND
"""Time that agents and gateways have to answer; an audit does not judge those that are later."""
_CLAIMS_NS = 10 * NANOSECONDS_PER_SECOND
"""Time that gateways and agents have after a change of leader to say which sessions are theirs."""


class AuditedGateways(Protocol):
    """The part of the gateway registry that audits use."""

    def broadcast(self, message: scheduler_pb2.SchedulerToGatewayMessage) -> None:
        """Sends a message to every connected gateway."""
        ...

    def forget(self, request: RequestId) -> None:
        """Stops counting a request as open at its gateway, whatever is said of it later."""
        ...

    def known(self) -> frozenset[GatewayId]:
        """Returns every gateway, including those whose stream broke only recently."""
        ...

    def open_requests(self) -> frozenset[RequestId]:
        """Returns the requests that are neither finished nor refused."""
        ...


@dataclass(frozen=True, slots=True)
class AuditDeps:
    """The parts of a term that an audit compares, and the peers that it asks."""

    settings: SchedulerSettings
    cluster: ClusterController
    dispatcher: CombinedDispatcher
    book: Book
    in_flight: InFlightBatches
    live: LiveSessions
    waiting: NotReadyQueue
    gateways: AuditedGateways
    agents: AgentSender
    epoch: Callable[[], Epoch]
    first_id: int
    """Smallest id of the batches and sessions of this term; smaller ids are those of earlier
    terms."""
    feed: Callable[[Event, Nanoseconds], None]
    let_cached: Callable[[AgentId, PartitionKey, int], None]
    """Called with the number of tokens, counted once per block, that an agent has cached for a
    partition."""


class BookAudits:
    """The audits of one term.

    Attributes:
        leaks_mended: Number of leaks that were found and are gone.
    """

    def __init__(self, deps: AuditDeps, metrics: Metrics) -> None:
        """Schedules the first audit one interval from now."""
        settings = deps.settings
        self.leaks_mended = 0
        self._deps = deps
        self._metrics = metrics
        self._interval_ns = round(settings.audit_interval_s * NANOSECONDS_PER_SECOND)
        self._auditor = Auditor(round(settings.audit_grace_s * NANOSECONDS_PER_SECOND))
        self._number = deps.epoch() << 20
        self._began_ns = self._asked_ns = now_ns()

    @property
    def audits(self) -> int:
        """Number of audits that are over."""
        return self._auditor.audits

    def tick(self, now: Nanoseconds) -> None:
        """Begins an audit when one is due, and ends it when all have answered or the time is up."""
        auditor = self._auditor
        waited_ns = now - self._asked_ns
        if auditor.is_open:
            if auditor.is_complete or waited_ns >= _ANSWER_TIMEOUT_NS:
                self._judge(now)
        elif self._interval_ns and waited_ns >= self._interval_ns:
            self._asked_ns = now
            self._ask(now)

    def agent_says(self, record: AgentState, message: scheduler_pb2.Holdings) -> None:
        """Handles an agent's answer; answers to earlier audits only update its cached tokens."""
        agent = record.agent.agent_id
        for each in message.partitions:
            partition = partition_of(each.key)
            if partition in record.loaded:
                self._deps.let_cached(agent, partition, each.cached_block_tokens)
        if message.number == self._number:
            self._auditor.agent_says(agent, holdings_of(agent, message))

    def gateway_says(self, gateway: GatewayId, message: scheduler_pb2.Unanswered) -> None:
        """Handles a gateway's answer; answers to earlier audits are ignored."""
        if message.number == self._number:
            self._auditor.gateway_says(gateway, _wants(message))

    def gone(self, who: AgentId | GatewayId) -> None:
        """Drops the answers of an agent or a gateway that went away."""
        self._auditor.gone(who)

    # ---- inside ----

    def _ask(self, now: Nanoseconds) -> None:
        deps = self._deps
        self._number += 1
        self._auditor.begin(scheduler_holdings(deps, settled=now - self._began_ns >= _CLAIMS_NS))
        held = scheduler_pb2.ReportHoldings(number=self._number)
        deps.agents.broadcast(
            scheduler_pb2.SchedulerToAgentMessage(epoch=deps.epoch(), report_holdings=held)
        )
        wanted = scheduler_pb2.ReportUnanswered(number=self._number)
        deps.gateways.broadcast(scheduler_pb2.SchedulerToGatewayMessage(report_unanswered=wanted))

    def _judge(self, now: Nanoseconds) -> None:
        settled = now - self._began_ns >= _CLAIMS_NS
        leaks = self._auditor.end(scheduler_holdings(self._deps, settled=settled), now)
        self._metrics.book_audits.inc()
        for leak in self._auditor.mended:
            self.leaks_mended += 1
            self._metrics.book_leaks_mended.labels(leak.kind).inc()
        for leak in leaks:
            _log.warning("book_leak", kind=leak.kind, **leak.facts)
            self._metrics.book_leaks.labels(leak.kind).inc()
            self._mend(leak, now)

    def _mend(self, leak: Leak, now: Nanoseconds) -> None:
        deps, remedy = self._deps, remedy_of(leak)
        if leak.request is not None and leak.session is None:
            deps.gateways.forget(leak.request)
            if leak.request in deps.waiting.requests:
                deps.waiting.remove(leak.request)
                return  # the dispatcher never heard of it
        if isinstance(remedy, CancelBatch):
            message = cancel_batches_message([remedy.batch], deps.epoch())
            for agent in remedy.agents:
                deps.agents.send(agent, message)
        elif remedy is not None:
            deps.feed(remedy, now)
        elif leak.batch is not None:
            deps.in_flight.over(leak.batch)
        elif leak.partition is not None and leak.agent is not None:
            deps.cluster.partition_lost(leak.agent, leak.partition)


def scheduler_holdings(deps: AuditDeps, *, settled: bool) -> SchedulerHoldings:
    """Returns what the scheduler believes that agents and gateways hold at this moment."""
    dispatcher, book = deps.dispatcher, deps.book
    followed = frozenset(dispatcher.pooled.followed())
    registry = deps.cluster.registry
    open_requests = (*dispatcher.pooled.open_requests(), *dispatcher.chained.open_requests())
    return SchedulerHoldings(
        sessions={claim.session: claim for claim in dispatcher.chained.claims()},
        split=frozenset(deps.live.split()),
        followed=followed,
        booked={
            batch: agents_of(book.ahead(batch)) for batch in book.batches() if batch not in followed
        },
        in_flight=frozenset(deps.in_flight.batches()),
        requests=frozenset((*open_requests, *deps.waiting.requests)),
        open=deps.gateways.open_requests(),
        agents=frozenset(a for a, record in registry.items() if record.session is not None),
        gateways=deps.gateways.known(),
        hosted={agent: frozenset(record.loaded) for agent, record in registry.items()},
        first_id=deps.first_id,
        settled=settled,
    )


def holdings_of(agent: AgentId, message: scheduler_pb2.Holdings) -> AgentHoldings:
    sessions: dict[SessionId, tuple[ChainHop, ...]] = {}
    known: dict[tuple[object, ...], tuple[ChainHop, ...]] = {}  # most sessions share a few routes
    for each in message.sessions:
        key, route = each.partition, [(hop.first_block, hop.last_block) for hop in each.route]
        where = (key.model, key.model_version, key.first_block, key.last_block, *route)
        hops = known.get(where)
        if hops is None:
            partition = partition_of(key)
            hops = known[where] = tuple(ChainHop(agent, partition, *blocks) for blocks in route)
        sessions[SessionId(each.session_id)] = hops
    return AgentHoldings(
        frozenset(BatchId(each.batch_id) for each in message.batches),
        sessions,
        frozenset(SessionId(each.session_id) for each in message.sessions if each.passed_on),
        frozenset(map(SessionId, message.leads_moves_to)),
        frozenset(partition_of(each.key) for each in message.partitions),
    )


def _wants(message: scheduler_pb2.Unanswered) -> GatewayRequests:
    return GatewayRequests(
        {
            request.request_id: tuple(
                ExpectedSession(SessionId(each.session_id), each.sent_ago_ns or None)
                for each in request.sessions
            )
            for request in message.requests
        }
    )
