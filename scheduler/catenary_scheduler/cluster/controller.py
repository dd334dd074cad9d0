"""Brings agents to host what the plan asks for and puts it in force: desired to real state.

Every event (an agent came, a partition was loaded, a plan was applied, time passed) ends in
`reconcile`, which compares what should be with what is and takes the missing steps. It may be
called at any time and any number of times; after changes that come by the hundred it is paced.

    desired    the plan to serve by: one from outside, or the planner's
    rollouts   the change from the plan in force to the desired one, without a pause if possible
    activator  the plan in force
    hosting    the agents, and orders to load and unload
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from catenary_scheduler.agents.content_check import ContentCheck
from catenary_scheduler.agents.content_sources import ContentSources
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.hosting import AgentCallbacks, HostingGoal, PartitionHosting
from catenary_scheduler.agents.load_orders import LoadOrders
from catenary_scheduler.agents.readiness import judge
from catenary_scheduler.agents.registry import (
    AgentRegistry,
    AgentState,
    FetchProgress,
    LoadedPartition,
)
from catenary_scheduler.cluster.active_plan import ActivePlan, PlanActivator, PlanCallbacks
from catenary_scheduler.cluster.desired_plan import DesiredPlan
from catenary_scheduler.cluster.pacing import PacedWork
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import Placement, requirements
from catenary_scheduler.replanning.chain_costs import latency_lines, service_times
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.rollout.driver import RolloutController
from catenary_scheduler.rollout.report import RolloutReport
from catenary_scheduler.rollout.rollout import ClusterSnapshot, PlanRollout, RolloutPhase
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    Epoch,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    PlanId,
)
from catenary_services.log import get_logger

_log = get_logger(__name__)
_EMPTY = Placement(())
_MOVE_SESSIONS_NS = 3 * NANOSECONDS_PER_SECOND
"""Time after which sessions in the way of a change of plan that could not be moved are started
again elsewhere; those that are being moved have twice as long."""


class ClusterCallbacks(AgentCallbacks, PlanCallbacks, Protocol):
    """The calls by which the cluster acts on the rest of the term."""

    @property
    def epoch(self) -> Epoch:
        """Epoch of this term, which orders carry and which is part of every plan's id."""
        ...

    def switch_ended(self, report: RolloutReport) -> None:
        """Handles the end of a change of plan: it is done, or was rolled back."""
        ...

    def move_sessions(
        self, agent: AgentId, partition: PartitionKey, *, must: bool, moving: bool
    ) -> None:
        """Moves the sessions on a partition, or starts them again elsewhere if they `must` go."""
        ...

    def cluster_changed(self) -> None:
        """Handles a change of agents, partitions, readiness or plan."""
        ...

    def note(self, kind: str, snapshot: dict[str, str]) -> None:
        """Enters an event, by its kind and its facts, into the event stream."""
        ...


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Time limits and numbers of attempts of loading and of changes of plan."""

    load_timeout_s: float = 120.0
    load_attempts: int = 1
    switch_timeout_ns: Nanoseconds = 120 * 10**9

    @classmethod
    def of(cls, settings: SchedulerSettings) -> RetryLimits:
        switch_timeout_ns = int(settings.switch_timeout_s * NANOSECONDS_PER_SECOND)
        return cls(settings.load_timeout_s, settings.load_attempts, switch_timeout_ns)


class ClusterController:
    """The agents, orders and plans of one term. Implements `driver.RolloutActions`.

    Attributes:
        desired: Decides which placement should be in force.
        target: The placement that should be in force; None if there cannot be one yet.
        content: Finds agents that have other weights than the rest.
        sources: Names the peers that agents fetch model files from.
    """

    def __init__(
        self,
        callbacks: ClusterCallbacks,
        deployments: Deployments,
        planner: Planner,
        measured: MeasuredProfiles,
        limits: RetryLimits,
    ) -> None:
        self._callbacks = callbacks
        self._deployments = deployments
        self._orders = LoadOrders(
            limits.load_timeout_s, limits.load_attempts, callbacks.availability
        )
        self._hosting = PartitionHosting(callbacks, deployments, self._orders, measured)
        self.content = ContentCheck(deployments.ready, self._hosting.registry, callbacks.note)
        self.sources = ContentSources(self._hosting.registry)
        self._hosting.expect_content(self.content.expected, self.sources.of)
        registry, shape = self._hosting.registry, planner.session_shape
        self._activator = PlanActivator(
            callbacks,
            deployments,
            measured,
            lambda: service_times(deployments, measured, registry, shape),
            lambda: latency_lines(deployments, measured, registry),
        )
        self._rollouts = RolloutController(self, limits.switch_timeout_ns)
        self._ready: dict[ModelKey, str] = {}
        self._resume_until_s: float | None = None
        """Time, in monotonic seconds, until which the plan of an earlier leader comes first, as far
        as its agents report; None once it is resumed."""
        self._now_s = 0.0
        self._paced = PacedWork(lambda: self.reconcile(time.monotonic()))
        self.desired = DesiredPlan(deployments, planner, callbacks.availability)
        self.target: Placement | None = None

    # ---- what is known ----

    @property
    def registry(self) -> AgentRegistry:
        """All known agents, connected or not."""
        return self._hosting.registry

    @property
    def active(self) -> ActivePlan | None:
        """The plan in force; None before the first plan."""
        return self._activator.active

    @property
    def restored(self) -> tuple[Placement, PlanId] | None:
        """Placement and plan id an earlier leader dispatched by; None once they are replaced."""
        return self._activator.restored

    @property
    def plan_id(self) -> str:
        """Id of the plan in force; empty without one."""
        return self._activator.plan_id

    @property
    def is_settled(self) -> bool:
        """True if the plan in force is the desired one."""
        placement = self.active.placement if self.active is not None else None
        return placement is not None and placement == self.target and not self.is_switching

    @property
    def is_switching(self) -> bool:
        """True while a change of plan is under way or is being rolled back."""
        return self._rollouts.rollout is not None

    @property
    def last_switch(self) -> RolloutReport | None:
        """The last rollout that is over; None if there was none."""
        return self._rollouts.last

    def rollout_report(self) -> RolloutReport | None:
        """Returns the running rollout, or else the last one; None if there was none."""
        return self._rollouts.report(now_ns())

    def is_ready(self, model: ModelKey) -> bool:
        """Returns True if requests for the model can be given to the dispatcher now."""
        return self._ready.get(model) == ""

    def reason(self, model: ModelKey) -> str:
        """Returns why a model is not ready; empty if it is."""
        reason = self._ready.get(model)
        if reason == "":
            return ""
        infeasible = self._activator.infeasible.get(model, "")
        problem = self.desired.problem()
        servers = {agent: str(each.agent.server) for agent, each in self.registry.items()}
        coming = self.sources.fetching(model)
        said = [*self._orders.problems(model, servers), infeasible, reason or "", coming, problem]
        return "; ".join(dict.fromkeys(text for text in said if text)) or "partitions are loading"

    # ---- what happened ----

    def restore(self, placement: Placement, plan_id: PlanId, until_s: float) -> None:
        """Takes over an earlier leader's placement, whose agents are awaited until `until_s`."""
        self._activator.restored = (placement, plan_id)
        self._hosting.inherit(placement, until_s)
        self._resume_until_s = until_s

    def restore_report(self, report: RolloutReport) -> None:
        """Takes over an earlier leader's report about its last rollout."""
        self._rollouts.last = report

    def fix(self, placement: Placement | None) -> None:
        """Serves by a placement from outside; None: by the planner's proposals again."""
        self.desired.fix(placement, is_switching=self.is_switching)

    def agent_arrives(self, record: AgentState) -> None:
        """Registers an agent with the partitions it hosts already; `changed` must follow."""
        self._hosting.connected(record)

    def agent_disconnected(self, agent_id: AgentId, now_s: float) -> None:
        """Notes that an agent is gone with all that it hosted."""
        self._hosting.disconnected(agent_id, now_s)
        self.content.gone(agent_id)
        self._paced.ask()

    def partition_loaded(
        self, agent_id: AgentId, key: PartitionKey, loaded: LoadedPartition, now_s: float
    ) -> None:
        """Notes that an agent loaded a partition as ordered."""
        self._hosting.loaded(agent_id, key, loaded, now_s)
        self.content.loaded(agent_id, key)
        self._paced.ask()

    def partition_failed(
        self,
        agent_id: AgentId,
        key: PartitionKey,
        problem: str,
        *,
        out_of_memory: bool,
        now_s: float,
    ) -> None:
        """Notes that an agent could not load a partition."""
        _log.warning("partition_failed", agent=agent_id, partition=str(key), error=problem)
        self._orders.failed(agent_id, key, problem, now_s, out_of_memory=out_of_memory)
        self._paced.ask()

    def fetches(self, record: AgentState, told: Sequence[FetchProgress], now_s: float) -> None:
        """Notes how far an agent has come with fetching files; what makes progress is not late."""
        before = {each.model: each.fetched_bytes for each in record.fetches}
        record.fetches = tuple(told)
        for each in told:
            if each.fetched_bytes != before.get(each.model, 0):
                self._orders.progressed(record.agent.agent_id, each.model, now_s)
                self._rollouts.progressed(now_ns())

    def loads(self, record: AgentState, model: ModelKey, since_s: float) -> None:
        """Notes that an agent loads a model, and since when without progress.

        An engine may take longer to start than a change of plan may take that nothing is heard of.
        """
        self._orders.progressed(record.agent.agent_id, model, since_s)
        self._rollouts.progressed(round(since_s * NANOSECONDS_PER_SECOND))

    def partition_lost(self, agent_id: AgentId, key: PartitionKey) -> None:
        """Notes that an agent does not host a partition after all; it is loaded again."""
        self._hosting.lost(agent_id, key)
        self._paced.ask()

    def changed(self) -> None:
        """Has `reconcile` called, at once or a moment later with what else has changed by then."""
        self._paced.ask()

    def tick(self, now: Nanoseconds) -> None:
        """Reconciles, as deadlines may have passed; this, too, may come a moment later."""
        self._paced.ask()

    def close(self) -> None:
        """Takes no step any more by itself. Idempotent."""
        self._paced.close()

    def reconcile(self, now_s: float) -> None:
        """Takes the steps that are missing from the real to the desired state."""
        self._now_s = now_s
        self._part_unlike()
        self._resume()
        self._advance_rollout()
        self._move_sessions()
        self._activate_new_models()
        if not self.is_switching and self._activator.gains_routes():
            self._activate(self._activator.placement)
        self._leave_drained()
        self._host()
        self._hosting.tell_loaded(self._activator.placement)
        plan = self.active.plan if self.active else None
        self._ready = judge(
            self._deployments.ready, plan, self.target, self.registry, self._callbacks.availability
        )
        self._callbacks.cluster_changed()

    # ---- what rollouts do (`driver.RolloutActions`) ----

    def snapshot(self) -> ClusterSnapshot:
        """Returns the cluster as a rollout sees it now."""
        goal = HostingGoal(self._activator.placement, self.target or _EMPTY, self._rollouts.rollout)
        return self._hosting.snapshot(goal, self._activator.objection, now_ns(), self._now_s)

    def apply(self, rollout: PlanRollout) -> None:
        """Puts the new plan in force; models that are new only take part once they are loaded."""
        running = {model.model: model for model in self._activator.placement.models}
        changed = {model.model: model for model in rollout.part.models}
        hosted = self._hosting.loaded_models(rollout.new, self._now_s)
        there = {**running, **changed}
        models = [
            there.get(model.model, model)
            for model in rollout.new.models
            if model.model in there or model.model in hosted
        ]
        self._activate(Placement(tuple(models)))
        self.desired.accepted()

    def hold(self, rollout: PlanRollout) -> Collection[ModelKey]:
        """Dispatches by the rest of the old plan; returns the models that have none left."""
        assert self.active is not None
        left = rollout.reduced(self.active.plan)
        self._callbacks.dispatch_by(left)
        return [model.model for model in left.models if not model.pipelines and not model.chains]

    def empty(self, rollout: PlanRollout) -> None:
        """Forgets orders that crowded agents refused, as they have more memory free now."""
        for agent in rollout.crowded:
            self._hosting.forget_orders(agent)

    def release(self) -> None:
        """Dispatches by the whole plan in force again."""
        assert self.active is not None
        self._callbacks.dispatch_by(self.active.plan)

    def rejected(self, rollout: PlanRollout) -> None:
        """Goes back to the plan that was desired before the rollout."""
        self.desired.rejected(rollout, self._activator.placement, self._now_s)

    def switch_ended(self, report: RolloutReport) -> None:
        """Tells the rest of the term that a change of plan ended."""
        self._callbacks.switch_ended(report)

    # ---- reconcile, step by step ----

    def _part_unlike(self) -> None:
        """Takes partitions out of service whose content differs from that of the other agents."""
        for agent, key, text in self.content.unlike():
            self._hosting.give_up(agent, key, text, self._now_s)
            self.content.differs(agent, key, text)

    def _resume(self) -> None:
        """Resumes the plan of an earlier leader, as far as its agents have reported."""
        if self._resume_until_s is None or self._activator.restored is None:
            return
        placement = self.desired.known(self._activator.restored[0])
        hosted = self._hosting.loaded_models(placement, self._now_s, resuming=True)
        models = tuple(model for model in placement.models if model.model in hosted)
        if models != self._activator.placement.models:
            self._activate(Placement(models))
        if len(models) == len(placement.models) or self._now_s >= self._resume_until_s:
            self._resume_until_s = None
            if self.active is not None:
                self._activator.restored = None

    def _advance_rollout(self) -> None:
        for _ in range(2):  # after a rollout that failed, the desired plan may be another one
            self.target = self.desired.target(self.registry, self._now_s)
            if self.target is None and self._deployments.is_empty and self.active is not None:
                self.target = _EMPTY  # the last model was undeployed
            if self.target is None or self._resume_until_s is not None:
                return
            last = self.last_switch
            cause = self.desired.cause(self._activator.placement)
            self._rollouts.follow(self.target, cause)
            if self.last_switch is last:
                return

    def _move_sessions(self) -> None:
        """Moves sessions out of the way of a change of plan, instead of awaiting their end."""
        rollout = self._rollouts.rollout
        if rollout is None or rollout.phase is not RolloutPhase.FLUSHING:
            return
        waited_ns = now_ns() - rollout.since_ns
        must, moving = waited_ns >= _MOVE_SESSIONS_NS, waited_ns >= 2 * _MOVE_SESSIONS_NS
        snapshot = self.snapshot()
        for agent in sorted(rollout.crowded):
            for key in snapshot.surplus(agent, rollout.new):
                self._callbacks.move_sessions(agent, key, must=must, moving=moving)

    def _activate_new_models(self) -> None:
        """Starts to serve models that were not served before as soon as they are loaded."""
        if self.target is None or self._resume_until_s is not None:
            return
        before = self._activator.placement.models
        running = {model.model: model for model in before}
        hosted = self._hosting.loaded_models(self.target, self._now_s)
        models = [
            running.get(model.model, model)
            for model in self.target.models
            if model.model in running or model.model in hosted
        ]
        if self.is_switching:  # models that go in the end still serve
            staying = {model.model for model in models}
            models += [model for model in before if model.model not in staying]
        if tuple(models) != before:
            self._activate(Placement(tuple(models)))

    def _activate(self, placement: Placement) -> None:
        rollout = self._rollouts.rollout
        self._activator.activate(placement, rollout.reduced if rollout else lambda plan: plan)
        if self._resume_until_s is None and placement == self.target:
            self._activator.restored = None
        self._hosting.tell_loaded(placement)

    def _leave_drained(self) -> None:
        """Drops draining agents from the plan in force if no pipeline or chain is lost by it."""
        placement = self._activator.placement
        draining = self._hosting.draining()
        if not draining & requirements.agents_of(placement):
            return
        smaller = requirements.without(placement, set(draining))
        before = [(len(model.pipelines), len(model.chains)) for model in placement.models]
        if [(len(model.pipelines), len(model.chains)) for model in smaller.models] == before:
            self._activate(smaller)

    def _host(self) -> None:
        """Orders agents to load and unload partitions."""
        resuming = self._resume_until_s is not None
        target = self.target
        if resuming and self._activator.restored is not None:
            target = self._activator.restored[0]
        if target is not None:
            goal = HostingGoal(self._activator.placement, target, self._rollouts.rollout)
            self._hosting.host(goal, self._now_s, may_unload=not resuming)
