"""The rivals of our planner, as `catenaryd.plug_ins.Planner`."""

from __future__ import annotations

from catenary_lab.pools.alpa_serve import plan_alpa_serve
from catenary_lab.pools.baselines import plan_dart_r, plan_without_partitioning
from catenary_lab.pools.reference import reference_plan
from catenary_scheduler.planning.pooled.dataset import PlanningDataset
from catenary_scheduler.planning.pooled.planner import Clock
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem


def without_partitioning(
    dataset: PlanningDataset, instance: str, problem: PoolingProblem, clock: Clock
) -> PooledPlan:
    """Returns the plan of NP, in which every model is whole."""
    return plan_without_partitioning(problem, clock=clock)


def dart_r(
    dataset: PlanningDataset, instance: str, problem: PoolingProblem, clock: Clock
) -> PooledPlan:
    """Returns the plan of DART-r, which consists of pairs of GPUs."""
    return plan_dart_r(problem, clock=clock)


def alpa_serve(
    dataset: PlanningDataset, instance: str, problem: PoolingProblem, clock: Clock
) -> PooledPlan:
    """Returns AlpaServe's placement, in which models take turns on groups of GPUs."""
    return plan_alpa_serve(problem, clock=clock)


def recorded(
    dataset: PlanningDataset, instance: str, problem: PoolingProblem, clock: Clock
) -> PooledPlan:
    """Returns the plan that PPipe's authors recorded, as the data set has it."""
    return reference_plan(dataset, instance)
