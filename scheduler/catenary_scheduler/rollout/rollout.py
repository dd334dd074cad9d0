"""One change from the plan in force to the next, as a state machine without I/O.

    loading ──► done                          everything fits side by side: no pause at all
       │
       └──► flushing ──► moving ──► done      crowded agents must give up old partitions first

    loading, flushing ──► rolled back         nothing was given up yet: the old plan just goes on
    moving ──► returning ──► rolled back      crowded agents load their old partitions again

While flushing, moving and returning, models that lose a pool on a crowded agent are dispatched to
what is left of their pipelines; one without a whole pipeline is *paused*: its requests wait in
their queue, and the time until they can be dispatched again is its downtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.requirements import can_go_back, only
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
)
from catenary_services.domain.plan import ModelPlan, Plan

_FLUSH_GRACE_NS = 5 * NANOSECONDS_PER_SECOND


class RolloutPhase(StrEnum):
    """The phase of a rollout; the last two are ends."""

    LOADING = "loading"
    FLUSHING = "flushing"
    MOVING = "moving"
    RETURNING = "returning"
    DONE = "done"
    ROLLED_BACK = "rolled back"


ENDS = (RolloutPhase.DONE, RolloutPhase.ROLLED_BACK)
HostedPartition = tuple[AgentId, PartitionKey]


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster as a rollout sees it at one moment.

    Attributes:
        now_ns: The moment.
        active: The placement in force.
        missing: Returns the partitions that a placement still lacks, without those of agents that
            need not be waited for.
        is_present: True for an agent that is connected.
        gave_up: Returns why an agent cannot load a partition; empty while it may still succeed.
        is_crowded: True for an agent that cannot hold what it lacks beside what it has.
        is_ordered: True while an agent was told to load a partition and has not answered.
        in_use: True while a batch in flight, or a session, needs a partition.
        surplus: Returns the partitions an agent has loaded that are not part of a placement.
        objection: Returns why a placement cannot be dispatched by although it is loaded; empty if
            it can.
    """

    now_ns: Nanoseconds
    active: Placement
    missing: Callable[[Placement], list[HostedPartition]]
    is_present: Callable[[AgentId], bool]
    gave_up: Callable[[AgentId, PartitionKey], str]
    is_crowded: Callable[[AgentId], bool]
    is_ordered: Callable[[AgentId, PartitionKey], bool]
    in_use: Callable[[AgentId, PartitionKey], bool]
    surplus: Callable[[AgentId, Placement], list[PartitionKey]]
    objection: Callable[[Placement], str]


@dataclass(slots=True)
class PlanRollout:
    """One attempt to change the plan.

    Invariant: `crowded`, `affected` and `paused` are empty while loading; `problem` is set from the
    moment it was decided to go back.
    """

    new: Placement
    """The placement of the whole cluster that is to be in force in the end."""
    models: frozenset[ModelKey]
    """Models served before and after, but differently: this rollout changes them."""
    cause: str
    """A phrase about who or what wanted it."""
    from_plan: str
    began_ns: Nanoseconds
    timeout_ns: Nanoseconds
    witnesses: frozenset[AgentId] = frozenset()
    """Agents of the new placement that were there when it began: losing one ends the rollout."""
    phase: RolloutPhase = RolloutPhase.LOADING
    since_ns: Nanoseconds = 0
    """Moment at which the phase began."""
    crowded: frozenset[AgentId] = frozenset()
    """Agents that must give up old partitions before they can load new ones."""
    affected: frozenset[ModelKey] = frozenset()
    """Models of the old plan that lose a pool on a crowded agent."""
    paused: dict[ModelKey, Nanoseconds] = field(default_factory=dict)
    """Models without a whole pipeline, and since when."""
    downtime_ns: dict[ModelKey, Nanoseconds] = field(default_factory=dict)
    progressed_ns: Nanoseconds = 0
    """The last moment at which an agent had fetched more of the files that it lacks, or said that
    loading gets on."""
    has_moved: bool = False
    """True if old partitions were unloaded: they must be loaded again to go back."""
    problem: str = ""
    to_plan: str = ""
    ended_ns: Nanoseconds = 0

    @property
    def part(self) -> Placement:
        """The placement that this rollout waits for; it does not wait for models that are new."""
        return only(self.new, self.models)

    @property
    def is_over(self) -> bool:
        """True once the rollout is done or rolled back."""
        return self.phase in ENDS

    @property
    def is_holding(self) -> bool:
        """True while affected models must not be dispatched to crowded agents."""
        return self.phase in (RolloutPhase.FLUSHING, RolloutPhase.MOVING, RolloutPhase.RETURNING)

    def advance(self, snapshot: ClusterSnapshot) -> bool:
        """Takes one step if one is possible; True if the phase changed."""
        before = self.phase
        if self.phase is RolloutPhase.LOADING:
            self._load(snapshot)
        elif self.phase is RolloutPhase.FLUSHING:
            self._flush(snapshot)
        elif self.phase is RolloutPhase.MOVING:
            self._move(snapshot)
        elif self.phase is RolloutPhase.RETURNING:
            self._return(snapshot)
        return self.phase is not before

    def go_back(self, problem: str, snapshot: ClusterSnapshot) -> None:
        """Gives the new plan up for the reason in `problem`."""
        self.problem = problem
        self._enter(
            RolloutPhase.RETURNING if self.has_moved else RolloutPhase.ROLLED_BACK, snapshot
        )

    def reduced(self, plan: Plan) -> Plan:
        """Returns the part of the old plan to dispatch by; all of it unless holding."""
        if not self.is_holding:
            return plan
        return replace(
            plan,
            models=tuple(
                _without(model, self.crowded) if model.model in self.affected else model
                for model in plan.models
            ),
        )

    def pause(self, models: Iterable[ModelKey], now_ns: Nanoseconds) -> None:
        """Notes that these models cannot be dispatched from now on."""
        self.paused = dict.fromkeys(models, now_ns)

    def resume(self, now_ns: Nanoseconds) -> None:
        """Ends every pause and adds it to the downtime of its model."""
        for model, since_ns in self.paused.items():
            self.downtime_ns[model] = self.downtime_ns.get(model, 0) + now_ns - since_ns
        self.paused = {}

    # ---- one phase each ----

    def _load(self, snapshot: ClusterSnapshot) -> None:
        if self._turned_back(snapshot):
            return
        lacking = snapshot.missing(self.part)
        if not lacking:
            self._finish(snapshot)
            return
        crowded = frozenset(agent for agent, _ in lacking if snapshot.is_crowded(agent))
        waited_for = any(
            agent not in crowded or snapshot.is_ordered(agent, key) for agent, key in lacking
        )
        if waited_for:
            return
        self.crowded = crowded
        served = {model.model for model in snapshot.active.models}
        surplus = {key.model for agent in crowded for key in snapshot.surplus(agent, self.new)}
        self.affected = frozenset(surplus & served)
        self._enter(RolloutPhase.FLUSHING, snapshot)

    def _flush(self, snapshot: ClusterSnapshot) -> None:
        if self._turned_back(snapshot):
            return
        busy = any(
            snapshot.in_use(agent, key)
            for agent in self.crowded
            for key in snapshot.surplus(agent, self.new)
        )
        longest = max((model.slo_ns for model in snapshot.active.models), default=0)
        if not busy:
            self.has_moved = True
            self._enter(RolloutPhase.MOVING, snapshot)
        elif snapshot.now_ns - self.since_ns > 2 * longest + _FLUSH_GRACE_NS:
            self.go_back("batches of the old plan did not come to an end", snapshot)

    def _move(self, snapshot: ClusterSnapshot) -> None:
        if not self._turned_back(snapshot) and not snapshot.missing(self.part):
            self._finish(snapshot)

    def _return(self, snapshot: ClusterSnapshot) -> None:
        # An agent that is gone or cannot load is not waited for here: the rest goes on without it.
        lacking = [
            agent
            for agent, key in snapshot.missing(snapshot.active)
            if snapshot.is_present(agent) and not snapshot.gave_up(agent, key)
        ]
        if not lacking:
            self._enter(RolloutPhase.ROLLED_BACK, snapshot)

    def _finish(self, snapshot: ClusterSnapshot) -> None:
        objection = snapshot.objection(self.part)
        if objection and can_go_back(snapshot.active, self.new, snapshot.is_present):
            self.go_back(objection, snapshot)
        else:
            self._enter(RolloutPhase.DONE, snapshot)

    def _enter(self, phase: RolloutPhase, snapshot: ClusterSnapshot) -> None:
        self.phase, self.since_ns = phase, snapshot.now_ns
        if self.is_over:
            self.ended_ns = snapshot.now_ns

    def _turned_back(self, snapshot: ClusterSnapshot) -> bool:
        problem = self._takeover_failures(snapshot)
        if not problem or not can_go_back(snapshot.active, self.new, snapshot.is_present):
            return False
        self.go_back(problem, snapshot)
        return True

    def _takeover_failures(self, snapshot: ClusterSnapshot) -> str:
        """Returns why the new plan cannot be reached; empty while it can."""
        for agent in sorted(self.witnesses):
            if not snapshot.is_present(agent):
                return f"{agent} was lost"
        lacking = snapshot.missing(self.part)
        for agent, key in lacking:
            problem = snapshot.gave_up(agent, key)
            # A crowded agent is asked again later for what it refused beside its old partitions.
            if problem and (self.has_moved or not snapshot.is_crowded(agent)):
                return f"{agent} cannot load {key}: {problem}"
        if snapshot.now_ns - max(self.began_ns, self.progressed_ns) > self.timeout_ns:
            what = ", ".join(f"{key} on {agent}" for agent, key in lacking)
            seconds = self.timeout_ns / NANOSECONDS_PER_SECOND
            return f"not ready within {seconds:.0f} s" + (f", waiting for {what}" if what else "")
        return ""


def _without(model: ModelPlan, gone: frozenset[AgentId]) -> ModelPlan:
    pipelines = []
    for pipeline in model.pipelines:
        stages = tuple(
            replace(stage, agents=tuple(agent for agent in stage.agents if agent not in gone))
            for stage in pipeline.stages
        )
        if all(stage.agents for stage in stages):
            pipelines.append(replace(pipeline, stages=stages))
    chains = tuple(c for c in model.chains if not any(hop.agent in gone for hop in c.hops))
    return replace(model, pipelines=tuple(pipelines), chains=chains)
