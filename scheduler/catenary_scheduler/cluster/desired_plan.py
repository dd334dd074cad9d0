"""Decides which plan should be in force: one from outside, or the planner's proposal."""

from __future__ import annotations

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.planning import Placement, requirements
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.replanning.provenance import HAND, PlanProvenance
from catenary_scheduler.rollout.rollout import PlanRollout
from catenary_services.domain.ids import AgentId


class DesiredPlan:
    """The placement that should be in force, and its origin.

    Attributes:
        fixed: The placement of a file or of `ApplyPlan`; None if the planner decides.
        fixed_before: The value of `fixed` before the switch under way.
    """

    def __init__(
        self, deployments: Deployments, planner: Planner, availability: Availability
    ) -> None:
        self._availability = availability
        self._deployments = deployments
        self._planner = planner
        self.fixed: Placement | None = None
        self.fixed_before: Placement | None = None

    @property
    def provenance(self) -> PlanProvenance | None:
        """Origin of the desired plan; None if the planner has not proposed one."""
        if self.fixed is not None:
            return PlanProvenance(HAND, "by a plan file or `catenary plan apply`")
        return self._planner.provenance

    def fix(self, placement: Placement | None, *, is_switching: bool) -> None:
        """Serves by a placement from outside; None: by the planner's proposals again."""
        if not is_switching:  # otherwise the plan in force is still that of `fixed_before`
            self.fixed_before = self.fixed
        self.fixed = placement

    def target(self, registry: AgentRegistry, now_s: float) -> Placement | None:
        """Returns the placement that should be in force; None if there cannot be one yet."""
        if self.fixed is not None:
            return self.known(requirements.without(self.fixed, self._draining()))
        models = [each.for_planning() for each in self._deployments.ready.values()]
        placement = self._planner.follow(models, registry, now_s)
        return None if placement is None else self.known(placement)

    def known(self, placement: Placement) -> Placement:
        """Returns the part of a placement whose models are deployed."""
        known = self._deployments.ready
        return Placement(tuple(model for model in placement.models if model.model in known))

    def cause(self, present: Placement) -> str:
        """Returns in words why the desired placement differs from the present one."""
        leaving = self._draining() & requirements.agents_of(present)
        if leaving:
            return f"{', '.join(sorted(leaving))} is to be drained"
        if self.fixed is not None:
            return "a plan was given from outside"
        return self._planner.provenance.cause if self._planner.provenance is not None else ""

    def rejected(self, rollout: PlanRollout, present: Placement, now_s: float) -> None:
        """Goes back to the plan that was desired before a rollout that failed."""
        if self.fixed is not None:
            self.fixed, self.fixed_before = self.fixed_before, None
        else:
            self._planner.rejected(present, rollout.problem, now_s)

    def accepted(self) -> None:
        """Tells the planner that the rollout of its plan is done."""
        self._planner.accepted()

    def problem(self) -> str:
        """Returns why there is no plan, or not the best one; empty if all is well."""
        return self._planner.problem if self.fixed is None else ""

    def _draining(self) -> set[AgentId]:
        return set(self._availability.impaired_by(Impairment.DRAINING))
