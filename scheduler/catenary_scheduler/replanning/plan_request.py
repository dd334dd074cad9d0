"""Inputs of one plan, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from catenary_scheduler.planning import DeployedModel, Placement
from catenary_scheduler.planning.live import Hosted
from catenary_scheduler.replanning.agent_choice import Unable
from catenary_scheduler.replanning.changed_times import Factors
from catenary_scheduler.replanning.provenance import PlanProvenance
from catenary_scheduler.scaling import SessionLoad
from catenary_services.domain.ids import AgentId, ModelKey
from catenary_services.domain.plan import Agent


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Inputs of a plan at one moment."""

    cause: str
    models: tuple[DeployedModel, ...]
    agents: tuple[Agent, ...]
    shares: Mapping[ModelKey, float]
    hosted: Hosted
    session_loads: Mapping[ModelKey, SessionLoad] = field(default_factory=dict)
    """Loads of the models that generate text."""
    present: Placement = Placement(())  # noqa: RUF009 - immutable
    """The placement that was proposed last, which chains are kept from; empty before the first."""
    provenance: PlanProvenance | None = None
    """Origin of the previous proposal; None if there was none."""
    chains_only: bool = False
    """True if everything but the chains is to stay as it is."""
    unable: Unable = field(default_factory=dict)
    """Agents to leave out for a model, as long as others are left."""
    idle: Mapping[AgentId, str] = field(default_factory=dict)
    """Reasons why agents are used by no pool of the previous proposal."""

    @property
    def generating(self) -> tuple[DeployedModel, ...]:
        return tuple(model for model in self.models if model.decoder is not None)

    def able(self, *models: DeployedModel) -> tuple[Agent, ...]:
        """Returns the agents that can load all of these models; all agents if none can."""
        none = frozenset[AgentId]()
        unable = none.union(*[self.unable.get(model.key, none) for model in models])
        return tuple(a for a in self.agents if a.agent_id not in unable) or self.agents

    @property
    def others(self) -> PlanRequest:
        """The same request without the models that generate text."""
        return replace(self, models=tuple(m for m in self.models if m.decoder is None))


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A placement, how it was made, and what is wrong with it."""

    placement: Placement
    provenance: PlanProvenance
    has_failed: bool = False
    """True if it is an even split because planning broke down, not because that is the best
    plan."""
    problem: str = ""
    """Reason why a model that generates text has no chains; empty if all have."""
    session_loads: Mapping[ModelKey, SessionLoad] = field(default_factory=dict)
    """The loads that the chains were composed for."""
    corrections: Factors = field(default_factory=dict)
    """Factors by which measurements corrected the times that the pools were planned with."""
    objective_rps: float = 0.0
    """Load that its pools take; 0 if nobody compared it with the plan in force."""
    present_rps: float = 0.0
    """Load that the pools of the plan in force take by the same times; 0 if unknown."""
    idle: Mapping[AgentId, str] = field(default_factory=dict)
    """Reason why an agent is used by no pool, where the pooled planner knows one."""
    guessed: tuple[ModelKey, ...] = ()
    """Models whose chains go by guesses, since no agent has measured them."""
