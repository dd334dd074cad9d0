"""What should be in force: a plan from outside, or what the planner proposes."""

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
    """Who decides, and what.

    Attributes:
        fixed: The placement of a file or of `ApplyPlan`; None where the planner decides.
        fixed_before: What `fixed` was before the plan that is being switched to.
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
        """How what is wanted came about."""
        if self.fixed is not None:
            return PlanProvenance(HAND, "by a plan file or `catenary plan apply`")
        return self._planner.provenance

    def fix(self, placement: Placement | None, *, is_switching: bool) -> None:
        """Serves by a placement from outside, or by what the planner says again."""
        if not is_switching:  # else what is in force is still the one before
            self.fixed_before = self.fixed
        self.fixed = placement

    def target(self, registry: AgentRegistry, now_s: float) -> Placement | None:
        """Returns what should be in force; None if there cannot be a plan yet."""
        if self.fixed is not None:
            return self.known(requirements.without(self.fixed, self._draining()))
        models = [each.for_planning() for each in self._deployments.ready.values()]
        placement = self._planner.follow(models, registry, now_s)
        return None if placement is None else self.known(placement)

    def known(self, placement: Placement) -> Placement:
        """Returns the part of a placement that is about models there are."""
        known = self._deployments.ready
        return Placement(tuple(model for model in placement.models if model.model in known))

    def cause(self, present: Placement) -> str:
        """Returns, in words, why what should be in force is not what is."""
        leaving = self._draining() & requirements.agents_of(present)
        if leaving:
            return f"{', '.join(sorted(leaving))} is to be drained"
        if self.fixed is not None:
            return "a plan was given from outside"
        return self._planner.provenance.cause if self._planner.provenance is not None else ""

    def rejected(self, rollout: PlanRollout, present: Placement, now_s: float) -> None:
        """A rollout failed: goes back to what was wanted before."""
        if self.fixed is not None:
            self.fixed, self.fixed_before = self.fixed_before, None
        else:
            self._planner.rejected(present, rollout.problem, now_s)

    def accepted(self) -> None:
        """A rollout is done."""
        self._planner.accepted()

    def problem(self) -> str:
        """Returns why there is no plan, or not the one there should be; empty if all is well."""
        return self._planner.problem if self.fixed is None else ""

    def _draining(self) -> set[AgentId]:
        return set(self._availability.impaired_by(Impairment.DRAINING))
