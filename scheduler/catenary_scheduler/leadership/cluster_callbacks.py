"""Passes changes of agents and plans on from the cluster to the other parts of a leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from catenary_scheduler.agents.registry import AgentRegistry, servers_of
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.events import AgentJoined, AgentLost, Event, PlanActivated
from catenary_scheduler.feedback.hop_reports import HopReports
from catenary_scheduler.feedback.link_measurements import LinkMeasurements
from catenary_scheduler.feedback.session_reports import SessionReports
from catenary_scheduler.feedback.transfer_rates import TransferRates
from catenary_scheduler.inflight.batches import InFlightBatches
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.planning.survival import survival_of
from catenary_scheduler.rollout.report import RolloutReport, observe_switch
from catenary_scheduler.rpc.announcer import Announcer
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.storage.lease import Lease
from catenary_services.domain.ids import AgentId, Epoch, Nanoseconds, PartitionKey
from catenary_services.domain.plan import Agent, Plan
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
Note = Callable[[str, dict[str, str]], None]


@dataclass(frozen=True, slots=True)
class CallbackDeps:
    """The parts that hear of changes; they need the cluster, so they are made after it."""

    registry: AgentRegistry
    in_flight: InFlightBatches
    live: LiveSessions
    hop_reports: HopReports
    sessions: SessionReports
    transfer_rates: TransferRates
    link_measurements: LinkMeasurements
    announcer: Announcer
    feed: Callable[[Event, Nanoseconds], None]


class LeaderCallbacks:
    """Implements `controller.ClusterCallbacks`.

    Args:
        lease: The lease of this leader, with its epoch.
        availability: Tells which agents can be given work.
        metrics: The metrics that show the plan in force.
        journal: Adds an entry to the event stream, to be written with whatever is written next.
        note: Adds an entry to the event stream and has it written soon.
    """

    def __init__(
        self,
        lease: Lease,
        availability: Availability,
        metrics: Metrics,
        journal: Note,
        note: Note,
    ) -> None:
        self.availability = availability
        self.note = note
        self._lease = lease
        self._metrics = metrics
        self._journal = journal
        self._deps: CallbackDeps | None = None

    def connect(self, deps: CallbackDeps) -> None:
        """Sets the parts that hear of changes; must be called before any change."""
        self._deps = deps

    @property
    def epoch(self) -> Epoch:
        return self._lease.epoch

    # ---- agents ----

    def agent_joined(self, agent: Agent) -> None:
        """Lets the dispatcher use an agent for the partitions that it has loaded."""
        self.availability.connected(agent.agent_id)
        parts = self._parts
        parts.feed(AgentJoined(parts.link_measurements.seen(agent)), now_ns())

    def agent_lost(self, agent: AgentId) -> None:
        """Gives up the batches and sessions of an agent, and takes it from the dispatcher."""
        parts = self._parts
        parts.in_flight.lost(agent)
        parts.hop_reports.forget(agent)
        self.availability.disconnected(agent)
        held = parts.sessions.let_go(agent)
        parts.feed(AgentLost(agent), now_ns())
        parts.live.may_be_over(held)

    def is_in_use(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True while a batch in flight or a session needs a partition on an agent."""
        if self._parts.in_flight.uses_partition(agent, partition):
            return True
        return self._parts.live.uses_partition(agent, partition)

    def move_sessions(
        self, agent: AgentId, partition: PartitionKey, *, must: bool, moving: bool
    ) -> None:
        """Has the sessions on a partition go on elsewhere, to make room.

        Args:
            agent: The agent that hosts the partition.
            partition: The partition that is to make room.
            must: False moves sessions as far as other chains have room. True starts those that are
                not about to move again elsewhere.
            moving: With `must`, True starts also those again that are about to move.
        """
        self._parts.sessions.move(agent, partition, must=must, moving=moving)

    def cluster_changed(self) -> None:
        self._parts.announcer.cluster_changed()

    # ---- plans ----

    def dispatch_by(self, plan: Plan) -> None:
        """Has the dispatcher follow this plan, or this part of a plan, from now on."""
        parts = self._parts
        parts.transfer_rates.planned(plan)
        parts.feed(PlanActivated(parts.sessions.latency.refreshed(plan)), now_ns())

    def plan_activated(self, plan: Plan) -> None:
        """Shows in metrics, events and logs that this plan is in force, and how fragile it is."""
        self._metrics.set_active_plan(plan.plan_id)
        self._journal("plan_activated", {"plan": plan.plan_id})
        servers = servers_of(self._parts.registry)
        survivals = [(str(model.model), survival_of(model, servers)) for model in plan.models]
        fragile = {name: survival for name, survival in survivals if survival.is_fragile}
        self._metrics.fragile_models.set(len(fragile))
        for name, survival in fragile.items():
            _log.warning("plan_is_fragile", model=name, problem=survival.in_words())

    def switch_ended(self, report: RolloutReport) -> None:
        """Reports a change of plan that was completed or rolled back."""
        kind, facts = report.as_event()
        _log.info(kind, **facts)
        self._journal(kind, facts)
        observe_switch(report, self._metrics)

    @property
    def _parts(self) -> CallbackDeps:
        assert self._deps is not None
        return self._deps
