"""The streams of the agents: reports come in, orders go out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.epoch_claims import EpochClaim
from catenary_scheduler.agents.registry import (
    AgentState,
    AgentStream,
    FetchProgress,
    LoadedPartition,
)
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.cluster.draining import Draining
from catenary_scheduler.dispatch import CombinedDispatcher
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.events import Event, SessionsClosed
from catenary_scheduler.inflight.queued_batches import queued_reservations
from catenary_scheduler.inflight.session_moves import SessionMoves
from catenary_scheduler.observed.stuck_agents import StuckAgents
from catenary_scheduler.planning.requirements import CacheRequirement
from catenary_scheduler.rpc.announcer import Announcer
from catenary_scheduler.rpc.epoch_fence import EpochFence
from catenary_scheduler.rpc.plausibility import PlausibilityChecks
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.wire import messages as wire_messages
from catenary_scheduler.wire import session_messages
from catenary_scheduler.wire.streams import Speaks, first_pack, read_pack
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    Epoch,
    ModelKey,
    Nanoseconds,
    SessionId,
)
from catenary_services.domain.plan import Agent
from catenary_services.errors import CanaryFailed, ContentMismatch, InvalidInput, Unavailable
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
_OF_CONTENT = (ContentMismatch.reason, CanaryFailed.reason)
"""Reasons of failed loads that are about model content or wrong results, not about memory."""
_ORDER_S = 1.0
"""The stream of an agent that was told to end stays open this long, so that the order arrives."""
_STUCK_NS = 60 * NANOSECONDS_PER_SECOND
"""An agent that was told to end counts as broken this long, unless a new process comes sooner."""
_CAME_AGAIN = "this process was told to end, and came again"
Message = scheduler_pb2.SchedulerToAgentMessage


class SessionCallbacks(Protocol):
    """The part of a leader that follows sessions that generate text."""

    def held(self, record: AgentState, hello: scheduler_pb2.AgentHello) -> None:
        """Takes in the sessions that a newly connected agent holds; it holds no others."""
        ...

    def reported(self, record: AgentState, report: scheduler_pb2.GenerationReport) -> None:
        """Takes in an agent's report of recent times of text generation."""
        ...


class AgentAudit(Protocol):
    """The part of a leader that audits the work that agents hold."""

    def agent_says(self, record: AgentState, message: scheduler_pb2.Holdings) -> None:
        """Takes in an agent's answer to an audit."""
        ...

    def gone(self, who: AgentId) -> None:
        """Forgets the answers of an agent that connected anew."""
        ...


class MeasuredTransfers(Protocol):
    """The part of a leader that learns transfer rates from moving sessions."""

    def caches_sent(self, agent: AgentId, message: scheduler_pb2.CachesSent) -> None:
        """Takes in an agent's report of the caches it recently sent, and of the time that took."""
        ...


class LinkAnswers(Protocol):
    """The part of a leader that has agents measure links."""

    def measured(
        self, record: AgentState, said: scheduler_pb2.LinkMeasured, now: Nanoseconds
    ) -> None:
        """Takes in an agent's measurement of the link to another."""
        ...


@dataclass(frozen=True, slots=True)
class AgentStreamDeps:
    """The parts of a leader that agents' streams ask, and that hear the agents' reports."""

    cluster: ClusterController
    dispatcher: CombinedDispatcher
    availability: Availability
    announcer: Announcer
    fence: EpochFence
    plausibility: PlausibilityChecks
    stuck: StuckAgents
    draining: Draining
    moves: SessionMoves
    sessions: SessionCallbacks
    transfers: MeasuredTransfers
    links: LinkAnswers
    audits: AgentAudit
    metrics: Metrics
    epoch: Callable[[], Epoch]
    feed: Callable[[Event, Nanoseconds], None]
    joined: Callable[[Agent], None]
    """Called when an agent has connected and its holdings are in the book."""
    journal: Callable[[str, dict[str, str]], None]
    """Adds an entry to the event stream, to be written with whatever is written next."""
    note: Callable[[str, dict[str, str]], None]
    """Adds an entry to the event stream and has it written soon."""
    silence_s: float
    """Seconds without a message after which an agent counts as lost."""


class AgentStreams:
    """The streams of all agents of one term."""

    def __init__(self, deps: AgentStreamDeps) -> None:
        self._deps = deps
        self._cluster = deps.cluster
        self._feed = deps.feed
        self._handlers: dict[str, Callable[[AgentState, Any, Nanoseconds], None]] = {
            "stage_report": self._stage_report,
            "stage_start": lambda _, said, now: self._feed(
                wire_messages.stage_started(said, now), now
            ),
            "batch_failed": lambda _, said, now: self._feed(
                wire_messages.batch_failed(said.batch_id, said.failure), now
            ),
            "sessions_closed": lambda record, said, now: self._feed(
                SessionsClosed(record.agent.agent_id, tuple(map(SessionId, said.session_ids))), now
            ),
            "session_failed": lambda record, said, now: self._feed(
                session_messages.session_failed(
                    said.session_id, said.failure, record.agent.agent_id
                ),
                now,
            ),
            "generation_report": lambda record, said, _: deps.sessions.reported(record, said),
            "session_moved": lambda _, said, __: deps.moves.moved(said),
            "caches_sent": self._caches_sent,
            "link_measured": deps.links.measured,
            "heartbeat": self._beats,
            "partition_loaded": self._partition_loaded,
            "partition_failed": self._partition_failed,
            "holdings": lambda record, said, _: deps.audits.agent_says(record, said),
            "order_refused": self._order_refused,
            "ending": self._ending,
            "drained": self._drained,
        }

    def begin(self, session: AgentStream, data: bytes, speaks: Speaks) -> None:
        """Takes in the first pack of an agent's stream, and has the others taken in.

        Args:
            session: The stream.
            data: The bytes of the pack.
            speaks: Is called with the name in the hello; raises if the peer may not use that name.

        Raises:
            CatenaryError: The stream is refused; the error says why.
        """
        pack = first_pack(scheduler_pb2.AgentMessages, data, "an agent")
        hello = pack.messages[0].hello
        speaks(hello.agent_id)
        if self._deps.stuck.must_end(AgentId(hello.agent_id), hello.incarnation):
            session.send(self._deps.announcer.agent_welcome())
            session.send(self._end_order(_CAME_AGAIN))
            session.flush()
            raise Unavailable(_CAME_AGAIN)
        self._deps.plausibility.check_hello(hello)
        record = self._joined(hello, session)

        def handle(data: bytes) -> None:
            self._handle(record, read_pack(scheduler_pb2.AgentMessages, data).messages)

        session.handle = handle
        session.left = lambda: self._left(record, session)
        self._handle(record, pack.messages[1:])

    def tick(self, now: Nanoseconds) -> None:
        """Ends the streams of agents that were silent for too long."""
        now_s, silence_s = now / NANOSECONDS_PER_SECOND, self._deps.silence_s
        for record in list(self._cluster.registry.values()):
            session = record.session
            if session is not None and now_s - session.heard_s > silence_s:
                # Lost at once: a stream of a hanging process may take its time to end.
                self._left(record, session)
                session.close(Unavailable(f"nothing was heard for {silence_s} s"))

    def _joined(self, hello: scheduler_pb2.AgentHello, session: AgentStream) -> AgentState:
        agent = wire_messages.agent_of(hello)
        refusal = self._deps.fence.refusal_of(EpochClaim(agent.agent_id, hello.epoch, hello.leader))
        if refusal is not None:
            raise refusal
        known = self._cluster.registry.get(agent.agent_id)
        if known is not None and known.session is not None:
            older = known.session
            self._left(known, older)
            older.close(Unavailable("a newer session of this agent took over"))
        loaded = {
            wire_messages.partition_of(each.key): _loaded(each, None) for each in hello.partitions
        }
        record = AgentState(
            agent,
            hello.incarnation,
            hello.peer,
            hello.device,
            time.monotonic(),
            session,
            loaded=loaded,
            software_version=hello.software_version,
            device_facts=hello.device_facts if hello.HasField("device_facts") else None,
            is_stopping=hello.draining,
        )
        _log.info("agent_joined", agent=agent.agent_id, device=hello.device, hosts=len(loaded))
        self._deps.audits.gone(agent.agent_id)
        if self._deps.stuck.came(agent.agent_id):
            self._deps.availability.clear(agent.agent_id, Impairment.BROKEN)
        try:
            self._greet(record, hello)
            self._cluster.agent_arrives(record)
            self._deps.sessions.held(record, hello)
            self._deps.joined(agent)
            self._cluster.changed()
        except Exception:
            self._left(record, session)  # an agent must not stay half known
            raise
        return record

    def _greet(self, record: AgentState, hello: scheduler_pb2.AgentHello) -> None:
        """Welcomes an agent, and enters the batches it holds into the book."""
        agent_id, dispatcher = record.agent.agent_id, self._deps.dispatcher
        self._deps.announcer.greet_agent(record, hello)
        if hello.batches:
            known = {reservation.batch for reservation in dispatcher.snapshot()}
            queued = queued_reservations(agent_id, hello.batches, known, now_ns())
            dispatcher.restore(queued)
        self._deps.journal("agent_joined", {"agent": agent_id, "device": record.device})

    def _left(self, record: AgentState, session: AgentStream) -> None:
        agent_id = record.agent.agent_id
        if record.session is session and self._cluster.registry.get(agent_id) is record:
            _log.warning("agent_lost", agent=agent_id)
            self._cluster.agent_disconnected(agent_id, time.monotonic())

    def _handle(self, record: AgentState, messages: Iterable[scheduler_pb2.AgentMessage]) -> None:
        now = now_ns()
        for message in messages:
            if record.session is None:
                return  # found silent a moment ago: this message belongs to no stream
            kind = message.WhichOneof("kind") or ""
            handle = self._handlers.get(kind)
            if handle is None:
                continue  # a message of a newer release
            said = getattr(message, kind)
            if self._deps.plausibility.believes_agent(record, kind, said, now):
                handle(record, said, now)

    def _stage_report(
        self, record: AgentState, report: scheduler_pb2.StageReport, now: Nanoseconds
    ) -> None:
        self._feed(wire_messages.stage_reported(report, now), now)

    def _caches_sent(
        self, record: AgentState, said: scheduler_pb2.CachesSent, now: Nanoseconds
    ) -> None:
        self._deps.moves.caches_sent(said)
        self._deps.transfers.caches_sent(record.agent.agent_id, said)

    def _beats(self, record: AgentState, beat: scheduler_pb2.Heartbeat, now: Nanoseconds) -> None:
        """Gives up an agent whose step does not end, so that its work goes elsewhere at once."""
        if beat.fetches or record.fetches:
            told = [_fetch(each) for each in beat.fetches]
            self._cluster.fetches(record, told, time.monotonic())
        for step in beat.steps:
            if step.kind == scheduler_pb2.STEP_KIND_LOADING and step.HasField("partition"):
                model = ModelKey(step.partition.model, step.partition.model_version)
                self._cluster.loads(record, model, time.monotonic() - step.age_ns / 1e9)
        agent_id, session = record.agent.agent_id, record.session
        why = self._deps.stuck.heard(agent_id, beat)
        if not why or session is None:
            return
        _log.error("agent_stuck", agent=agent_id, why=why)
        self._deps.stuck.told_to_end(agent_id, record.incarnation)
        self._give_up(agent_id, why)
        session.send(self._end_order(why))
        self._left(record, session)
        # The stream ends later, as the order to end has to arrive first.
        ended = Unavailable(f"told to end: {why}")
        asyncio.get_running_loop().call_later(_ORDER_S, session.close, ended)

    def _give_up(self, agent: AgentId, why: str) -> None:
        """Marks an agent as broken for `_STUCK_NS`, so that it gets no work."""
        until = now_ns() + _STUCK_NS
        self._deps.availability.impair(agent, Impairment.BROKEN, until=until, why=why)
        self._deps.metrics.agents_stuck.inc()
        self._deps.note("agent_stuck", {"agent": agent, "why": why})

    def _end_order(self, why: str) -> Message:
        return Message(epoch=self._deps.epoch(), end_process=scheduler_pb2.EndProcess(why=why))

    def _partition_loaded(
        self, record: AgentState, done: scheduler_pb2.PartitionLoaded, now: Nanoseconds
    ) -> None:
        key = wire_messages.partition_of(done.key)
        loaded = _loaded(done, record.layouts.get(key))
        self._cluster.partition_loaded(record.agent.agent_id, key, loaded, time.monotonic())

    def _partition_failed(
        self, record: AgentState, failed: scheduler_pb2.PartitionFailed, now: Nanoseconds
    ) -> None:
        agent_id, key = record.agent.agent_id, wire_messages.partition_of(failed.key)
        why = failed.failure.message
        if failed.failure.reason in _OF_CONTENT:
            self._cluster.content.refused(agent_id, key, why, failed.content_digest)
        self._cluster.partition_failed(
            agent_id, key, why, out_of_memory=failed.out_of_memory, now_s=time.monotonic()
        )

    def _order_refused(
        self, record: AgentState, said: scheduler_pb2.OrderRefused, now: Nanoseconds
    ) -> None:
        claim = EpochClaim(record.agent.agent_id, said.agent_epoch)
        refusal = self._deps.fence.refusal_of(claim)
        if isinstance(refusal, InvalidInput) and record.session is not None:
            record.session.close(refusal)

    def _ending(self, record: AgentState, ending: scheduler_pb2.Ending, now: Nanoseconds) -> None:
        agent_id = record.agent.agent_id
        _log.error("agent_ends", agent=agent_id, reason=ending.reason, why=ending.why)
        facts = {"agent": agent_id, "reason": ending.reason, "why": ending.why[:300]}
        self._deps.note("agent_ends", facts)
        if record.session is not None:
            self._left(record, record.session)

    def _drained(self, record: AgentState, said: scheduler_pb2.Drained, now: Nanoseconds) -> None:
        _log.info("agent_drained", agent=record.agent.agent_id)
        record.is_stopping = True
        self._deps.draining.mark(record.agent.agent_id)
        self._cluster.changed()


def _fetch(message: scheduler_pb2.ContentFetch) -> FetchProgress:
    return FetchProgress(
        ModelKey(message.model, message.model_version),
        message.wanted_bytes,
        message.fetched_bytes,
        message.bytes_per_second,
    )


def _loaded(
    message: scheduler_pb2.PartitionLoaded, ordered: CacheRequirement | None
) -> LoadedPartition:
    """Returns a partition as an agent reports it.

    The agent knows the size of its cache; the blocks at which chains enter are those of `ordered`,
    or the first block if it is None.
    """
    if not message.HasField("generation"):
        # An agent of an earlier release tells as many times as there are sizes.
        return LoadedPartition(
            message.memory_bytes,
            tuple(message.compute_ns),
            content=message.content_digest,
            max_batch=message.max_batch or len(message.compute_ns),
        )
    cost = message.generation
    entries = ordered.entry_blocks if ordered is not None else (message.key.first_block,)
    cache = CacheRequirement(cost.block_slots, cost.session_tokens, entries, cost.cache_tokens)
    return LoadedPartition(
        message.memory_bytes, (), session_messages.cost_of(cost), cache, message.content_digest
    )
