"""Completes placements to plans, puts them in force, and keeps the plan in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import ChainLatency, Placement, ServiceTime, complete_plan
from catenary_services.domain.ids import Epoch, ModelKey, PlanId
from catenary_services.domain.plan import ModelPlan, Plan
from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger

_log = get_logger(__name__)


class PlanCallbacks(Protocol):
    """The parts of a term that are told of plans."""

    @property
    def epoch(self) -> Epoch:
        """Epoch of this term, which is part of every plan's id."""
        ...

    def dispatch_by(self, plan: Plan) -> None:
        """Dispatches by this plan, which may be a part of the plan in force, from now on."""
        ...

    def plan_activated(self, plan: Plan) -> None:
        """Handles a plan that has been put in force."""
        ...


@dataclass(frozen=True, slots=True)
class ActivePlan:
    """The plan that is in force, and the placement it was made from."""

    plan: Plan
    placement: Placement


class PlanActivator:
    """Puts placements in force.

    Attributes:
        active: The plan in force and its placement; None before the first plan.
        restored: Placement and plan id an earlier leader dispatched by; None once they are
            replaced.
        infeasible: Reasons why models of the placement in force cannot be served.
    """

    def __init__(
        self,
        callbacks: PlanCallbacks,
        deployments: Deployments,
        measured: MeasuredProfiles,
        pace: Callable[[], ServiceTime],
        latency: Callable[[], ChainLatency],
    ) -> None:
        self._callbacks = callbacks
        self._deployments = deployments
        self._measured = measured
        self._pace = pace
        self._latency = latency
        self._plans = 0
        self.active: ActivePlan | None = None
        self.plan_id = ""
        """Id of the plan in force; empty without one."""
        self.restored: tuple[Placement, PlanId] | None = None
        self.infeasible: dict[ModelKey, str] = {}

    @property
    def placement(self) -> Placement:
        """The placement in force; an empty one before the first plan."""
        return self.active.placement if self.active else Placement(())

    def objection(self, placement: Placement) -> str:
        """Returns why a loaded placement cannot be dispatched by; empty if it can."""
        problems: dict[ModelKey, str] = {}
        for _ in self._completed(placement, PlanId(""), problems):
            pass
        return "; ".join(problems.values())

    def activate(self, placement: Placement, reduced: Callable[[Plan], Plan]) -> None:
        """Puts a placement in force; dispatches by the part of its plan `reduced` returns."""
        plan_id = self._next_id(placement)
        self.infeasible.clear()
        plan = Plan(plan_id, tuple(self._completed(placement, plan_id, self.infeasible)))
        for model, problem in self.infeasible.items():
            _log.error("model_not_planned", model=str(model), error=problem)
        self.active, self.plan_id = ActivePlan(plan, placement), plan.plan_id
        _log.info("plan_activated", plan=plan.plan_id, models=[str(m.model) for m in plan.models])
        self._callbacks.dispatch_by(reduced(plan))
        self._callbacks.plan_activated(plan)

    def gains_routes(self) -> bool:
        """Returns True if guests were loaded since that the plan in force had to do without."""
        if self.active is None:
            return False
        planned = {model.model: len(model.pipelines) for model in self.active.plan.models}
        waiting = tuple(
            model
            for model in self.active.placement.models
            if planned.get(model.model, 0) < len(model.pipelines)
            and any(pipeline.is_shared for pipeline in model.pipelines)
        )
        made = self._completed(Placement(waiting), PlanId(""), {}) if waiting else ()
        return any(len(model.pipelines) > planned.get(model.model, 0) for model in made)

    def _completed(
        self, placement: Placement, plan_id: PlanId, problems: dict[ModelKey, str]
    ) -> Iterator[ModelPlan]:
        """Yields the plans of models that can be served; enters the others in `problems`."""
        tables = {key: each.table for key, each in self._deployments.ready.items()}
        compute = self._measured.for_placement(placement)
        pace, latency = self._pace(), self._latency()
        for model in placement.models:
            try:
                part = Placement((model,))
                yield from complete_plan(part, tables, compute, plan_id, pace, latency).models
            except CatenaryError as error:
                problems[model.model] = error.message

    def _next_id(self, placement: Placement) -> PlanId:
        if self.restored is not None and self.restored[0] == placement:
            return self.restored[1]
        self._plans += 1
        return PlanId(f"plan-{self._callbacks.epoch}-{self._plans}")
