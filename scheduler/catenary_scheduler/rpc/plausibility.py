"""Checks whether messages of peers can be true, as far as this scheduler knows.

The rules of messages (`catenary_services.rules`) see a message alone. Here a message is compared
with orders and other knowledge: a peer speaks only for its own batches, sessions and partitions,
and nothing ends before it began. A message that cannot be true is left out, and its sender accused.
A message that may be late, or of a predecessor's time, passes; its handler ignores reports that
nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.registry import AgentRegistry, AgentState
from catenary_scheduler.dispatch import CombinedDispatcher
from catenary_scheduler.dispatch.events import DispatchBatch
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.observed.link_schedule import ANSWER_NS
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.observed.timelines import TimelineEntry, Timelines
from catenary_scheduler.planning.latency import expected_work_ns
from catenary_scheduler.rpc.peer_quarantine import PeerQuarantine
from catenary_scheduler.wire.messages import partition_of
from catenary_scheduler.wire.session_messages import work_of
from catenary_services.domain.groups import may_be_given_out
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    Epoch,
    GatewayId,
    Nanoseconds,
    SessionId,
)
from catenary_services.errors import InvalidMessage
from catenary_services.security.identity import Role

_SLACK_NS = 50_000_000
"""Tolerance for clocks of two machines that differ, and for messages that wait to be read."""
_SLACK_BYTES = 50_000_000
"""Tolerance for bytes that a link counts before the time it took to send them."""
_DRIFT = 1_000
"""The clocks of two machines run at the same speed to within one part in this many."""
_FASTEST_BYTES_PER_NS = 1_000
"""No link carries a terabyte per second."""
_MOST_OFF = 10_000
"""Real work differs by less than this factor from what was measured when the partition loaded."""
_LEAST_WORK_NS = 10_000_000
"""Reports of less work than this are too noisy to judge."""
_MOST_PARTITIONS = 4_096
"""More partitions than this on one agent cannot be true."""


@dataclass(frozen=True, slots=True)
class PlausibilityDeps:
    """The knowledge that messages are compared with, and the quarantine for false ones."""

    peer_quarantine: PeerQuarantine
    dispatcher: CombinedDispatcher
    deployments: Deployments
    registry: AgentRegistry
    measured: MeasuredProfiles
    timelines: Timelines
    live: LiveSessions
    epoch: Callable[[], Epoch]


class PlausibilityChecks:
    """Compares the messages of agents and gateways with the knowledge of the leader."""

    def __init__(self, deps: PlausibilityDeps) -> None:
        self._deps = deps
        self._of_gateways: dict[str, Callable[[GatewayId, Any], None]] = {
            "submit": self._submit,
            "submit_session": self._submit_session,
            "delivery_failed": self._delivery_failed,
            "session_failed": self._gateways_session,
            "window_report": self._window_report,
        }
        self._of_agents: dict[str, Callable[[AgentState, Any, Nanoseconds], None]] = {
            "stage_report": self._stage_report,
            "stage_start": self._stage_start,
            "batch_failed": self._batch_failed,
            "partition_loaded": self._partition_loaded,
            "session_failed": self._session_failed,
            "session_moved": self._session_moved,
            "sessions_closed": self._sessions_closed,
            "generation_report": self._generation_report,
            "caches_sent": self._caches_sent,
            "link_measured": self._link_measured,
        }

    def believes_agent(self, record: AgentState, kind: str, said: Any, now: Nanoseconds) -> bool:
        """Returns whether what an agent said may be true; if not, the agent is accused.

        `said` is the content of a message of the kind `kind`.
        """
        question = self._of_agents.get(kind)
        if question is None:
            return True
        try:
            question(record, said, now)
        except InvalidMessage as error:
            self._deps.peer_quarantine.accuse(Role.AGENT, record.agent.agent_id, error)
            return False
        return True

    def believes_gateway(self, gateway: GatewayId, kind: str, said: Any) -> bool:
        """Returns whether what a gateway said may be true; if not, the gateway is accused.

        `said` is the content of a message of the kind `kind`.
        """
        question = self._of_gateways.get(kind)
        if question is None:
            return True
        try:
            question(gateway, said)
        except InvalidMessage as error:
            self._deps.peer_quarantine.accuse(Role.GATEWAY, gateway, error)
            return False
        return True

    def check_hello(self, hello: scheduler_pb2.AgentHello) -> None:
        """Checks that the work in the hello of an agent was given out by some leader.

        Raises:
            InvalidMessage: An id was never given out, or a partition exceeds the agent's memory.
        """
        for batch in hello.batches:
            self._is_given_out("BatchInAgent", batch.batch_id)
        for session in hello.sessions:
            self._is_begun("SessionInAgent", session.session_id)
        for partition in hello.partitions:
            _fits(partition, hello.memory_bytes)

    # ---- agents ----

    def _stage_report(
        self, record: AgentState, report: scheduler_pb2.StageReport, now: Nanoseconds
    ) -> None:
        self._is_given_out("StageReport", report.batch_id)
        entry = self._deps.timelines.entry(BatchId(report.batch_id))
        agent = record.agent.agent_id
        if entry is None:
            self._stage_of_window(agent, report)
            return
        path = entry.command.path
        if report.position >= len(path) or path[report.position].agent != agent:
            raise InvalidMessage("StageReport", "position", "that hop was not ordered from it")
        took_ns = report.compute_ended_ago_ns + report.compute_ns
        _began_after("StageReport", "compute_ns", entry, took_ns, now)

    def _stage_start(
        self, record: AgentState, start: scheduler_pb2.StageStart, now: Nanoseconds
    ) -> None:
        self._is_given_out("StageStart", start.batch_id)
        entry = self._deps.timelines.entry(BatchId(start.batch_id))
        if entry is None:
            return
        # A transfer is told of by its sender, the hop before.
        path, teller = entry.command.path, start.position - start.is_transfer
        if start.position >= len(path) or teller < 0 or path[teller].agent != record.agent.agent_id:
            raise InvalidMessage("StageStart", "position", "that hop was not ordered from it")
        _began_after("StageStart", "started_ago_ns", entry, start.started_ago_ns, now)

    def _stage_of_window(self, agent: AgentId, report: scheduler_pb2.StageReport) -> None:
        """Checks the first report of a batch that a gateway sent by a window."""
        grant = self._deps.timelines.window_of(BatchId(report.batch_id))
        if grant is None:
            return
        if report.position >= len(grant.hops) or grant.hops[report.position].agent != agent:
            raise InvalidMessage("StageReport", "position", "that hop is not on the window's path")
        if report.rows > len(grant.hops[0].compute_ns):
            raise InvalidMessage("StageReport", "rows", "are more than a batch of the window has")

    def _batch_failed(
        self, record: AgentState, failed: scheduler_pb2.BatchFailed, _: Nanoseconds
    ) -> None:
        self._is_given_out("BatchFailed", failed.batch_id)
        entry = self._deps.timelines.entry(BatchId(failed.batch_id))
        if entry is None:
            return
        agents = {hop.agent for hop in entry.command.path}
        if record.agent.agent_id not in agents:
            raise InvalidMessage("BatchFailed", "batch_id", "was not ordered from it")
        _is_blamable("BatchFailed", failed.failure, entry.command)

    def _partition_loaded(
        self, record: AgentState, done: scheduler_pb2.PartitionLoaded, _: Nanoseconds
    ) -> None:
        _fits(done, record.agent.memory_bytes)
        key = partition_of(done.key)
        if key not in record.loaded and len(record.loaded) >= _MOST_PARTITIONS:
            raise InvalidMessage("PartitionLoaded", "key", "nobody has so many partitions")
        deployment = self._deps.deployments.ready.get(key.model)
        if deployment is not None and key.last_block > deployment.table.blocks:
            raise InvalidMessage(
                "PartitionKey", "last_block", f"{key.model} has {deployment.table.blocks} blocks"
            )

    def _session_failed(
        self, record: AgentState, failed: scheduler_pb2.SessionFailed, _: Nanoseconds
    ) -> None:
        self._is_begun("SessionFailed", failed.session_id)
        agents = self._agents_of(SessionId(failed.session_id))
        if agents and record.agent.agent_id not in agents:
            raise InvalidMessage("SessionFailed", "session_id", "runs on other agents")

    def _session_moved(
        self, record: AgentState, moved: scheduler_pb2.SessionMoved, _: Nanoseconds
    ) -> None:
        self._is_begun("SessionMoved", moved.session_id)
        self._is_begun("SessionMoved", moved.moved_session_id)
        agents = self._agents_of(SessionId(moved.moved_session_id))
        if agents and record.agent.agent_id not in agents:
            raise InvalidMessage("SessionMoved", "moved_session_id", "ran on other agents")

    def _sessions_closed(
        self, _: AgentState, closed: scheduler_pb2.SessionsClosed, __: Nanoseconds
    ) -> None:
        if closed.session_ids:
            self._is_begun("SessionsClosed", max(closed.session_ids))

    def _generation_report(
        self, record: AgentState, report: scheduler_pb2.GenerationReport, _: Nanoseconds
    ) -> None:
        """Refuses implausible times of text generation, which would spoil the latency lines."""
        observed = self._deps.measured.observed_at(record.agent.agent_id, partition_of(report.key))
        if observed is None:
            return
        busy_ns = report.decode_ns + report.prefill_ns
        expected_ns = expected_work_ns(observed.measured, work_of(report))
        if expected_ns <= 0 or max(busy_ns, expected_ns) < _LEAST_WORK_NS:
            return
        if not expected_ns <= busy_ns * _MOST_OFF <= expected_ns * _MOST_OFF**2:
            raise InvalidMessage(
                "GenerationReport",
                "decode_ns",
                f"{busy_ns} ns for what was measured to take {expected_ns:.0f} ns",
            )

    def _caches_sent(
        self, record: AgentState, sent: scheduler_pb2.CachesSent, _: Nanoseconds
    ) -> None:
        registry = self._deps.registry
        # A link to an agent that was just forgotten is no lie, but of no use either.
        known = [link for link in sent.links if AgentId(link.peer_id) in registry]
        for link in known:
            if link.bytes > max(1, link.sending_ns) * _FASTEST_BYTES_PER_NS + _SLACK_BYTES:
                raise InvalidMessage("Link", "bytes", "no link is as fast as that")
            if link.peer_id == record.agent.agent_id:
                raise InvalidMessage("Link", "peer_id", "nobody sends caches to itself")
        if len(known) < len(sent.links):
            kept = [scheduler_pb2.CachesSent.Link.FromString(k.SerializeToString()) for k in known]
            del sent.links[:]
            sent.links.extend(kept)

    def _link_measured(
        self, _: AgentState, measured: scheduler_pb2.LinkMeasured, __: Nanoseconds
    ) -> None:
        if measured.round_trip_ns > ANSWER_NS:
            raise InvalidMessage("LinkMeasured", "round_trip_ns", "is more than an answer may take")
        if measured.bytes_per_second > _FASTEST_BYTES_PER_NS * NANOSECONDS_PER_SECOND:
            raise InvalidMessage("LinkMeasured", "bytes_per_second", "no link is as fast as that")

    # ---- gateways ----

    def _submit(self, gateway: GatewayId, request: scheduler_pb2.SubmitRequest) -> None:
        for each in request.in_flight:
            self._is_given_out("InFlight", each.batch_id)
        if request.texts and sum([run.rows for run in request.texts]) != request.rows:
            raise InvalidMessage("SubmitRequest", "texts", "are not as many as its rows")

    def _submit_session(self, gateway: GatewayId, request: scheduler_pb2.SubmitSession) -> None:
        if request.session_id:
            self._is_begun("SubmitSession", request.session_id)

    def _delivery_failed(self, gateway: GatewayId, failed: scheduler_pb2.DeliveryFailed) -> None:
        self._is_given_out("DeliveryFailed", failed.batch_id)
        entry = self._deps.timelines.entry(BatchId(failed.batch_id))
        if entry is None:
            return
        command = entry.command
        if not any(piece.request.gateway == gateway for piece in command.slices):
            raise InvalidMessage("DeliveryFailed", "batch_id", "has no rows of it")
        _is_blamable("DeliveryFailed", failed.failure, command)

    def _gateways_session(self, gateway: GatewayId, failed: scheduler_pb2.SessionFailed) -> None:
        self._is_begun("SessionFailed", failed.session_id)
        request = self._deps.live.request_of(SessionId(failed.session_id))
        if request is not None and request.gateway != gateway:
            raise InvalidMessage("SessionFailed", "session_id", "is another gateway's")

    def _window_report(self, gateway: GatewayId, report: scheduler_pb2.WindowReport) -> None:
        self._is_given_out("WindowReport", report.window_id)
        grant = self._deps.timelines.window(BatchId(report.window_id))
        if grant is None:
            return
        if grant.gateway != gateway:
            raise InvalidMessage("WindowReport", "window_id", "is another gateway's")
        first = report.first_batch_id - grant.first_batch
        if first < 0 or first + len(report.rows) > grant.batches:
            raise InvalidMessage("WindowReport", "first_batch_id", "is not of the window")
        if report.rows and max(report.rows) > len(grant.hops[0].compute_ns):
            raise InvalidMessage("WindowReport", "rows", "are more than a batch of the window has")
        if report.requests > sum(report.rows):
            raise InvalidMessage("WindowReport", "requests", "are more than their rows")

    # ---- both ----

    def _is_given_out(self, kind: str, batch: int) -> None:
        following = self._deps.dispatcher.pooled.next_batch
        if batch >= following and not may_be_given_out(batch, following, self._deps.epoch()):
            raise InvalidMessage(kind, "batch_id", f"{batch} was never given out")

    def _is_begun(self, kind: str, session: int) -> None:
        following = self._deps.dispatcher.chained.next_session
        if session >= following and not may_be_given_out(session, following, self._deps.epoch()):
            raise InvalidMessage(kind, "session_id", f"{session} was never given out")

    def _agents_of(self, session: SessionId) -> set[AgentId]:
        """Returns the agents of a session, and of the sessions it moved from or moves to.

        These may send messages about it. Empty if the session is unknown.
        """
        live, chained = self._deps.live, self._deps.dispatcher.chained
        request = live.request_of(session)
        if request is None:
            return set()
        view = chained.session_of(request)
        sessions = {session}
        if view is not None:
            sessions.update(each for each in (view.session, view.moving_to, view.was) if each)
        return {hop.agent for each in sessions for hop in live.hops_of(each)}


def _fits(loaded: scheduler_pb2.PartitionLoaded, memory_bytes: int) -> None:
    if memory_bytes and loaded.memory_bytes > memory_bytes:
        raise InvalidMessage(
            "PartitionLoaded",
            "memory_bytes",
            f"{loaded.memory_bytes} of {memory_bytes} that the agent has",
        )


def _began_after(
    kind: str, field: str, entry: TimelineEntry, ago_ns: Nanoseconds, now: Nanoseconds
) -> None:
    elapsed_ns = now - entry.dispatched_ns
    if ago_ns > elapsed_ns + elapsed_ns // _DRIFT + _SLACK_NS:
        raise InvalidMessage(kind, field, f"began before it was ordered {elapsed_ns} ns ago")


def _is_blamable(kind: str, failure: common_pb2.Failure, batch: DispatchBatch) -> None:
    """Checks that a failure blames an agent or a gateway of its batch, or nobody.

    Raises:
        InvalidMessage: It blames a peer that has no part in the batch.
    """
    known = {hop.agent for hop in batch.path} | {p.request.gateway for p in batch.slices}
    if failure.agent_id and failure.agent_id not in known:
        raise InvalidMessage(kind, "failure.agent_id", "has no part in it")
