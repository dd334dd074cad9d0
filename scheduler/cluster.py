"""Brings the agents to host what the plan says, and activates it: desired state to real state.

Everything that happens (an agent came, a partition was loaded, a plan was applied, time passed)
ends in `reconcile`, which compares what should be with what is and does what is missing. It may be
called at any time and any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from catenary_protos.catenary.v1 import scheduler_pb2
from scheduler import targets
from scheduler.converters import partition_message
from scheduler.deployments import Deployments
from scheduler.even_plan import EvenPlan
from scheduler.load_orders import LoadOrders
from scheduler.measured import Measured
from scheduler.planning import Placement, complete_plan
from scheduler.readiness import judge
from scheduler.roster import AgentRecord, Loaded, Roster, hosts_in
from services.domain.ids import AgentId, Epoch, ModelKey, PartitionKey, PlanId
from services.domain.plan import Agent, ModelPlan, Plan
from services.errors import CatenaryError
from services.log import get_logger

_log = get_logger(__name__)


class Stage(Protocol):
    """What the cluster does to the rest of the term."""

    @property
    def epoch(self) -> Epoch:
        """Stamped on every order."""
        ...

    def agent_joined(self, agent: Agent) -> None:
        """The dispatcher may use an agent."""
        ...

    def agent_lost(self, agent: AgentId) -> None:
        """The dispatcher must not use it any more."""
        ...

    def plan_activated(self, plan: Plan) -> None:
        """Dispatch by this plan from now on."""
        ...

    def is_in_use(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True while a batch in flight needs a partition."""
        ...

    def cluster_changed(self) -> None:
        """Agents, partitions, readiness or plan are not what they were."""
        ...


@dataclass(frozen=True, slots=True)
class ActivePlan:
    """The plan that is dispatched by, and the placement it was made from."""

    plan: Plan
    placement: Placement


class Cluster:
    """Agents, orders and plans of one term.

    Attributes:
        fixed: The placement of a file or of `ApplyPlan`; None for an even split.
        active: What is dispatched by.
        restored: Placement and id a predecessor dispatched by, until it is active again.
    """

    def __init__(
        self, stage: Stage, deployments: Deployments, even: EvenPlan, orders: LoadOrders,
        measured: Measured,
    ) -> None:  # fmt: skip
        self._stage = stage
        self._deployments = deployments
        self._even = even
        self._orders = orders
        self._measured = measured
        self._plans = 0
        self._ready: dict[ModelKey, str] = {}
        self._recovery_until_s = 0.0
        self.roster: Roster = {}
        self.fixed: Placement | None = None
        self.target: Placement | None = None
        self.active: ActivePlan | None = None
        self.restored: tuple[Placement, PlanId] | None = None
        self._infeasible: dict[ModelKey, str] = {}

    # ---- what is known ----

    def is_ready(self, model: ModelKey) -> bool:
        """True if requests for the model can be dispatched now."""
        return self._ready.get(model) == ""

    def reason(self, model: ModelKey) -> str:
        """Returns why a model is not ready; empty if it is."""
        reason = self._ready.get(model)
        if reason == "":
            return ""
        said = [*self._orders.problems(model), self._infeasible.get(model, ""), reason or ""]
        if self.fixed is None:
            said.append(self._even.problem)
        return "; ".join(dict.fromkeys(text for text in said if text)) or "partitions are loading"

    @property
    def plan_id(self) -> str:
        """Of the active plan; empty without one."""
        return self.active.plan.plan_id if self.active else ""

    def restore(self, placement: Placement, plan_id: PlanId, until_s: float) -> None:
        """Takes over what a predecessor dispatched by; its agents are waited for until then."""
        self.restored = (placement, plan_id)
        self._recovery_until_s = until_s

    # ---- what happened ----

    def agent_connected(self, record: AgentRecord, now_s: float) -> None:
        """An agent said hello, with what it hosts already."""
        agent_id = record.agent.agent_id
        for key, loaded in record.loaded.items():
            self._measured.put(agent_id, key, loaded.compute_ns)
        self.roster[agent_id] = record
        self.reconcile(now_s)

    def agent_disconnected(self, agent_id: AgentId, now_s: float) -> None:
        """An agent is gone, and what it held is gone with it."""
        record = self.roster[agent_id]
        record.session = None
        record.since_s = now_s
        record.loaded.clear()
        self._orders.forget(agent_id)
        if record.joined:
            record.joined = False
            self._stage.agent_lost(agent_id)
        self.reconcile(now_s)

    def partition_loaded(
        self, agent_id: AgentId, key: PartitionKey, loaded: Loaded, now_s: float
    ) -> None:
        """An order was carried out."""
        self.roster[agent_id].loaded[key] = loaded
        self._measured.put(agent_id, key, loaded.compute_ns)
        self._orders.loaded(agent_id, key)
        self.reconcile(now_s)

    def partition_failed(
        self, agent_id: AgentId, key: PartitionKey, problem: str, now_s: float
    ) -> None:
        """An order could not be carried out."""
        _log.warning("partition_failed", agent=agent_id, partition=str(key), error=problem)
        self._orders.failed(agent_id, key, problem, now_s)
        self.reconcile(now_s)

    def reconcile(self, now_s: float) -> None:
        """Does what is missing between what should be and what is."""
        self.target = self._choose(now_s)
        self._order_partitions(now_s)
        self._activate_if_loaded(now_s)
        self._leave_drained()
        self._join_loaded()
        self._unload_unwanted()
        plan = self.active.plan if self.active else None
        self._ready = judge(self._deployments.ready, plan, self.target, self.roster)
        self._stage.cluster_changed()

    # ---- reconcile, step by step ----

    def _choose(self, now_s: float) -> Placement | None:
        if self.fixed is not None:
            draining = {a for a, record in self.roster.items() if record.draining}
            placement = targets.without(self.fixed, draining)
        else:
            models = [each.for_planning() for each in self._deployments.ready.values()]
            split = self._even.follow(models, self.roster, now_s)
            if split is None:
                return None
            placement = split
        known = self._deployments.ready
        return Placement(tuple(model for model in placement.models if model.model in known))

    def _order_partitions(self, now_s: float) -> None:
        if self.target is None:
            return
        for agent_id, record in self.roster.items():
            if record.session is None or record.draining:
                continue
            wanted = targets.wanted_of(self.target, agent_id)
            if self.active is not None:
                wanted = {**targets.wanted_of(self.active.placement, agent_id), **wanted}
            for key, (batch, float16) in wanted.items():
                if record.hosts(key, batch) or not self._orders.is_due(agent_id, key, now_s):
                    continue
                self._order(record, key, batch, float16)

    def _order(self, record: AgentRecord, key: PartitionKey, batch: int, float16: bool) -> None:
        deployment = self._deployments.ready.get(key.model)
        if deployment is None or record.session is None:
            return
        order = scheduler_pb2.LoadPartition(
            key=partition_message(key),
            max_batch=batch,
            float16_boundaries=float16,
            block_table_hash=deployment.table.model_hash,
        )
        _log.info("load_ordered", agent=record.agent.agent_id, partition=str(key), batch=batch)
        record.session.send(
            scheduler_pb2.SchedulerToAgentMessage(epoch=self._stage.epoch, load_partition=order)
        )

    def _activate_if_loaded(self, now_s: float) -> None:
        """Activates what is loaded of the target; other models go on as they are, if they do."""
        if self.target is None:
            return
        before = self.active.placement.models if self.active else ()
        running = {model.model: model for model in before}
        hosts = hosts_in(self.roster)
        models = []
        for model in self.target.models:
            alone = Placement((model,))
            if not targets.missing(alone, hosts, lambda a: self._excused(a, now_s)):
                models.append(model)
            elif model.model in running:
                models.append(running[model.model])
        if tuple(models) != before:
            self._activate(Placement(tuple(models)))

    def _activate(self, placement: Placement) -> None:
        plan_id = self._next_id(placement)
        plan = Plan(plan_id, tuple(self._completed(placement, plan_id)))
        self.active = ActivePlan(plan, placement)
        if placement == self.target:
            self.restored = None
        self._join_loaded()
        _log.info("plan_activated", plan=plan.plan_id, models=[str(m.model) for m in plan.models])
        self._stage.plan_activated(plan)

    def _completed(self, placement: Placement, plan_id: PlanId) -> Iterator[ModelPlan]:
        """Yields the models that can be served; one that cannot does not hinder the others."""
        tables = {key: each.table for key, each in self._deployments.ready.items()}
        compute = self._measured.for_placement(placement)
        self._infeasible.clear()
        for model in placement.models:
            try:
                yield from complete_plan(Placement((model,)), tables, compute, plan_id).models
            except CatenaryError as error:
                _log.error("model_not_planned", model=str(model.model), error=error.message)
                self._infeasible[model.model] = error.message

    def _next_id(self, placement: Placement) -> PlanId:
        if self.restored is not None and self.restored[0] == placement:
            return self.restored[1]
        self._plans += 1
        return PlanId(f"plan-{self._stage.epoch}-{self._plans}")

    def _leave_drained(self) -> None:
        """Stops sending to draining agents at once where nothing is lost by it."""
        if self.active is None:
            return
        draining = {a for a, record in self.roster.items() if record.draining}
        if not draining & targets.agents_of(self.active.placement):
            return
        smaller = targets.without(self.active.placement, draining)
        before = [len(model.pipelines) for model in self.active.placement.models]
        if [len(model.pipelines) for model in smaller.models] == before:
            self._activate(smaller)

    def _join_loaded(self) -> None:
        """Gives the dispatcher the agents that host all the active plan wants of them."""
        if self.active is None:
            return
        for agent_id, record in self.roster.items():
            if record.joined or record.session is None or record.draining:
                continue
            wanted = targets.wanted_of(self.active.placement, agent_id)
            if wanted and all(record.hosts(key, batch) for key, (batch, _) in wanted.items()):
                record.joined = True
                self._stage.agent_joined(record.agent)

    def _unload_unwanted(self) -> None:
        if self.active is None or self.active.placement != self.target:
            return
        for agent_id, record in self.roster.items():
            if record.session is None or record.draining:
                continue
            wanted = targets.wanted_of(self.active.placement, agent_id)
            for key in [key for key in record.loaded if key not in wanted]:
                if self._stage.is_in_use(agent_id, key):
                    continue
                del record.loaded[key]
                record.session.send(
                    scheduler_pb2.SchedulerToAgentMessage(
                        epoch=self._stage.epoch,
                        unload_partition=scheduler_pb2.UnloadPartition(key=partition_message(key)),
                    )
                )

    def _excused(self, agent: AgentId, now_s: float) -> bool:
        """A lost agent comes back by itself; one never seen is part of what is waited for."""
        record = self.roster.get(agent)
        if record is not None:
            return record.session is None
        return self.restored is not None and now_s >= self._recovery_until_s


def agents_by_state(roster: Mapping[AgentId, AgentRecord]) -> dict[str, int]:
    """Returns how many agents are in each state."""
    counts = dict.fromkeys(("joining", "ready", "draining", "lost"), 0)
    for record in roster.values():
        counts[record.state] += 1
    return counts
