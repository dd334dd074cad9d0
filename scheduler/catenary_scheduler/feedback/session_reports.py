"""What a term does about sessions beyond dispatching: adopting, moving, letting go, listening."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.registry import AgentState
from catenary_scheduler.book import SlotLedger
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    CachesReported,
    MoveRequested,
    SessionFailed,
    SessionsHeld,
)
from catenary_scheduler.feedback.latency_refit import LatencyRefit
from catenary_scheduler.inflight.session_hops import SessionHops
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.latency import expected_work_ns
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.wire.messages import partition_of
from catenary_scheduler.wire.session_messages import close_sessions_message, work_of
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, SessionId
from catenary_services.domain.latency import TokenObjectives
from catenary_services.errors import PartitionLost

if TYPE_CHECKING:
    from catenary_scheduler.leadership.leader import LeaderRuntime


class SessionReports:
    """Sessions of one term."""

    def __init__(self, leader: LeaderRuntime, live: LiveSessions, slots: SlotLedger) -> None:
        self._leader = leader
        self._live = live
        self._slots = slots
        self._cached: dict[tuple[AgentId, PartitionKey], int] = {}
        self._routes = SessionHops(live, leader.cluster.registry)
        self.latency = LatencyRefit(leader.cluster, leader.deployments, leader.measured, slots)

    def generates(self, model: ModelKey) -> bool:
        """True if a deployed model generates text."""
        deployment = self._leader.deployments.ready.get(model)
        return deployment is not None and deployment.decoder is not None

    def objectives(self, model: ModelKey) -> TokenObjectives | None:
        """Returns what requests of a model are held to that name no objectives."""
        active = self._leader.cluster.active
        for planned in active.plan.models if active is not None else ():
            if planned.model == model:
                return planned.objectives  # a plan file may say other than the manifest
        deployment = self._leader.deployments.ready.get(model)
        return deployment.manifest.objectives if deployment is not None else None

    def adopted(self, message: scheduler_pb2.SubmitSession) -> AdoptedSession | None:
        """Returns the session a request names that generates for it already."""
        if not message.session_id:
            return None
        session = SessionId(message.session_id)
        return AdoptedSession(session, self._routes.hops(session, message.route, self._placement))

    def held(self, record: AgentState, hello: scheduler_pb2.AgentHello) -> None:
        """An agent that said hello holds these sessions, and no others."""
        found = []
        for each in hello.sessions:
            session = SessionId(each.session_id)
            hops = self._routes.hops(session, each.route, self._placement)
            found.append(AdoptedSession(session, hops))
        self._leader.feed(SessionsHeld(record.agent.agent_id, tuple(found)), now_ns())

    def reported(self, record: AgentState, report: scheduler_pb2.GenerationReport) -> None:
        """An agent says what generating cost it lately."""
        self._took(record.agent.agent_id, report)
        if report.key.first_block == 0:  # every token passes the first block once
            model = ModelKey(report.key.model, report.key.model_version)
            self._leader.planner.generated(model, report.decode_rows, now_ns())
        agent, partition = record.agent.agent_id, partition_of(report.key)
        self.let_cached(agent, partition, report.cached_block_tokens)
        refitted = self.latency.reported(agent, partition, work_of(report), report.used_block_slots)
        if refitted is not None:
            self._leader.feed(refitted, now_ns())
        if self._slots.cache(agent, partition).token_capacity:
            cached = CachesReported(agent, partition, report.cached_block_tokens)
            self._leader.feed(cached, now_ns())

    def cached_at(self, agent: AgentId, partition: PartitionKey) -> int:
        """Returns the tokens an agent has cached for a partition, counted once per block."""
        return self._cached.get((agent, partition), 0)

    def let_cached(self, agent: AgentId, partition: PartitionKey, block_tokens: int) -> None:
        """An agent says how many tokens it has cached for a partition."""
        self._cached[agent, partition] = block_tokens

    def _took(self, agent: AgentId, report: scheduler_pb2.GenerationReport) -> None:
        """Notes how long an agent generated, and how long that was thought to take at load."""
        leader, now, partition = self._leader, now_ns(), partition_of(report.key)
        busy_ns = report.decode_ns + report.prefill_ns
        leader.was_busy(agent, busy_ns)
        leader.timelines.generated(agent, partition.model, busy_ns, now)
        observed = leader.measured.observed_at(agent, partition)
        if observed is not None:
            expected_ns = round(expected_work_ns(observed.measured, work_of(report)))
            leader.slowdowns.reported(agent, busy_ns, expected_ns, now)

    def move(self, agent: AgentId, partition: PartitionKey, *, must: bool, moving: bool) -> None:
        """Has the sessions on a partition go on elsewhere.

        Args:
            agent: Who hosts it.
            partition: What is to make room.
            must: Sessions that have not moved are started again elsewhere; else they are moved as
                far as another chain has room.
            moving: Those that are about to move are, too.
        """
        reason, text = PartitionLost.reason, f"{partition} on {agent} is to make room"
        for session in self._live.using(agent, partition):
            view = self._leader.dispatcher.chained.view(session)
            if must and (moving or view is None or view.moving_to is None):
                self._leader.feed(SessionFailed(session, agent, reason, text, True), now_ns())
            elif not must and view is not None and view.runs and view.moving_to is None:
                self._leader.feed(MoveRequested(session, mode=None), now_ns())

    def let_go(self, agent: AgentId) -> list[SessionId]:
        """Tells an agent that is not to be used any more to close all it holds, if it hears it.

        Returns:
            What it holds by the book.
        """
        held = self._slots.sessions_at(agent)
        if held:
            self._leader.agents.send(agent, close_sessions_message(held, self._leader.epoch))
        return held

    @property
    def _placement(self) -> Placement:
        """In force, or what a predecessor dispatched by."""
        cluster = self._leader.cluster
        if cluster.active is not None:
            return cluster.active.placement
        return cluster.restored[0] if cluster.restored is not None else Placement(())
