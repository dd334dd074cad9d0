"""Handles what agents report about sessions, and adopts, moves or closes sessions accordingly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.registry import AgentSender, AgentState
from catenary_scheduler.book import SlotLedger
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.dispatch import ChainedDispatcher
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    CachesReported,
    Event,
    MoveRequested,
    SessionFailed,
    SessionsHeld,
)
from catenary_scheduler.feedback.latency_refit import LatencyRefit
from catenary_scheduler.inflight.session_hops import SessionHops
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.observed.slowdowns import Slowdowns
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.observed.utilisation import Utilisation
from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.latency import expected_work_ns
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.wire.messages import partition_of
from catenary_scheduler.wire.session_messages import close_sessions_message, work_of
from catenary_services.domain.ids import (
    AgentId,
    Epoch,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    SessionId,
)
from catenary_services.domain.latency import TokenObjectives
from catenary_services.errors import PartitionLost
from catenary_services.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class SessionDeps:
    """The parts of a term that know sessions and models, or learn from agents' reports."""

    cluster: ClusterController
    deployments: Deployments
    chained: ChainedDispatcher
    live: LiveSessions
    slots: SlotLedger
    planner: Planner
    measured: MeasuredProfiles
    timelines: Timelines
    slowdowns: Slowdowns
    utilisation: Utilisation
    agents: AgentSender
    epoch: Callable[[], Epoch]
    feed: Callable[[Event, Nanoseconds], None]


class SessionReports:
    """Handles the reports and the moves of one term's sessions."""

    def __init__(self, deps: SessionDeps) -> None:
        self._deps = deps
        self._live, self._slots = deps.live, deps.slots
        self._cached: dict[tuple[AgentId, PartitionKey], int] = {}
        self._routes = SessionHops(deps.live, deps.cluster.registry)
        self.latency = LatencyRefit(deps.cluster, deps.deployments, deps.measured, deps.slots)

    def objectives(self, model: ModelKey) -> TokenObjectives | None:
        """Returns the objectives of a model's requests that name none; None if there are none."""
        active = self._deps.cluster.active
        for planned in active.plan.models if active is not None else ():
            if planned.model == model:
                return planned.objectives  # those of a plan file come before the manifest's
        deployment = self._deps.deployments.ready.get(model)
        return deployment.manifest.objectives if deployment is not None else None

    def adopted(self, message: scheduler_pb2.SubmitSession) -> AdoptedSession | None:
        """Returns the session that generates for a request already; None if it names none."""
        if not message.session_id:
            return None
        session = SessionId(message.session_id)
        return AdoptedSession(session, self._routes.hops(session, message.route, self._placement))

    def held(self, record: AgentState, hello: scheduler_pb2.AgentHello) -> None:
        """Tells the dispatcher which sessions an agent holds, all of which its hello names."""
        found = []
        for each in hello.sessions:
            session = SessionId(each.session_id)
            hops = self._routes.hops(session, each.route, self._placement)
            found.append(AdoptedSession(session, hops))
        self._deps.feed(SessionsHeld(record.agent.agent_id, tuple(found)), now_ns())

    def reported(self, record: AgentState, report: scheduler_pb2.GenerationReport) -> None:
        """Learns from an agent's report of the work it spent on generating."""
        self._took(record.agent.agent_id, report)
        if report.key.first_block == 0:  # every token passes the first block exactly once
            model = ModelKey(report.key.model, report.key.model_version)
            self._deps.planner.generated(model, report.decode_rows, now_ns())
        agent, partition = record.agent.agent_id, partition_of(report.key)
        self.let_cached(agent, partition, report.cached_block_tokens)
        refitted = self.latency.reported(agent, partition, work_of(report), report.used_block_slots)
        if refitted is not None:
            self._deps.feed(refitted, now_ns())
        if self._slots.cache(agent, partition).token_capacity:
            cached = CachesReported(agent, partition, report.cached_block_tokens)
            self._deps.feed(cached, now_ns())

    def cached_at(self, agent: AgentId, partition: PartitionKey) -> int:
        """Returns the tokens an agent has cached for a partition, counted once per block."""
        return self._cached.get((agent, partition), 0)

    def let_cached(self, agent: AgentId, partition: PartitionKey, block_tokens: int) -> None:
        """Notes how many tokens, counted once per block, an agent has cached for a partition."""
        self._cached[agent, partition] = block_tokens

    def _took(self, agent: AgentId, report: scheduler_pb2.GenerationReport) -> None:
        """Compares the time an agent generated for with the time its work was measured to take."""
        deps, now, partition = self._deps, now_ns(), partition_of(report.key)
        busy_ns = report.decode_ns + report.prefill_ns
        deps.utilisation.add(agent, busy_ns)
        deps.timelines.generated(agent, partition.model, busy_ns, now)
        observed = deps.measured.observed_at(agent, partition)
        if observed is not None:
            expected_ns = round(expected_work_ns(observed.measured, work_of(report)))
            deps.slowdowns.reported(agent, busy_ns, expected_ns, now)

    def move(self, agent: AgentId, partition: PartitionKey, *, must: bool, moving: bool) -> None:
        """Moves the sessions on a partition to other chains.

        Args:
            agent: The agent that hosts the partition.
            partition: The partition that is to make room.
            must: Whether sessions that have not moved are started again elsewhere; otherwise they
                are moved as far as other chains have room.
            moving: Whether `must` holds for sessions that are being moved, too.
        """
        reason, text = PartitionLost.reason, f"{partition} on {agent} is to make room"
        for session in self._live.using(agent, partition):
            view = self._deps.chained.view(session)
            if must and (moving or view is None or view.moving_to is None):
                self._deps.feed(SessionFailed(session, agent, reason, text, True), now_ns())
            elif not must and view is not None and view.runs and view.moving_to is None:
                self._deps.feed(MoveRequested(session, mode=None), now_ns())

    def let_go(self, agent: AgentId) -> list[SessionId]:
        """Tells an agent that is given up to close all its sessions, if it still hears it.

        Returns:
            The sessions that the agent holds by the book.
        """
        held = self._slots.sessions_at(agent)
        if held:
            self._deps.agents.send(agent, close_sessions_message(held, self._deps.epoch()))
        return held

    def export(self, metrics: Metrics) -> None:
        """Sets the gauges of capacity and sessions for the chains of the plan in force."""
        active, sessions = self._deps.cluster.active, self._live.by_chain()
        shown = set()
        for model in active.plan.models if active is not None else ():
            for number, chain in enumerate(model.chains):
                labels = model.model.name, str(number)
                shown.add(labels)
                metrics.chain_capacity.labels(*labels).set(chain.capacity)
                metrics.chain_in_flight.labels(*labels).set(sessions[chain.chain_id])
        metrics.keep_chains(shown)

    @property
    def _placement(self) -> Placement:
        """Placement in force, or else that of an earlier leader; empty without either."""
        cluster = self._deps.cluster
        if cluster.active is not None:
            return cluster.active.placement
        return cluster.restored[0] if cluster.restored is not None else Placement(())
