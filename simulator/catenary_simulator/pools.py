"""A planning task as it is simulated: the planner's margin, and the rates at load factor 1."""

from __future__ import annotations

from dataclasses import replace

from catenary_scheduler.planning.pooled.dataset import PlanningDataset
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_services.errors import InvalidInput

OWN_MARGIN = 0.2
"""Share of the SLO that the planner keeps free. The artifact keeps 0.4. This dispatcher fills gaps
and shares links exactly, so it serves more with a smaller margin and its larger plans, also when
compute and transfer times vary by 5 % (docs/results/pooled-pipelines.md)."""


def with_margin(problem: PoolingProblem, share: float = OWN_MARGIN) -> PoolingProblem:
    """Returns the task with every model's margin cut to at most `share` of its SLO."""
    return replace(
        problem,
        models=tuple(
            replace(each, margin_us=min(each.margin_us, share * each.slo_us))
            for each in problem.models
        ),
    )


def reference_rates(dataset: PlanningDataset, instance_id: str) -> dict[str, float]:
    """Returns the rate of each model in the artifact's PPipe plan: its load factor 1.

    Raises:
        InvalidInput: The instance states no rates.
    """
    instance = dataset.instance(instance_id)
    reached = instance.reference.get("v4", {}).get("xput_rps")
    if not reached:
        raise InvalidInput("base_rps", f"{instance_id} states no rates of the reference")
    return {str(dnn["dnn"]): float(rate) for dnn, rate in zip(instance.dnns, reached, strict=True)}
