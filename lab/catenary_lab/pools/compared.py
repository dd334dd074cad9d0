"""The planners a scenario compares, by name."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

from catenary_lab.pools.alpa_serve import plan_alpa_serve
from catenary_lab.pools.baselines import plan_dart_r, plan_without_partitioning
from catenary_lab.pools.problems import with_batch_building
from catenary_scheduler.planning.pooled import plan_pools
from catenary_scheduler.planning.pooled.dataset import DEFAULT_MAX_PARTITIONS
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.errors import InvalidInput, PlanInfeasible

Planner = Literal["catenary", "reference", "np", "dart-r", "alpaserve"]


def make(problem: PoolingProblem, planner: Planner) -> PooledPlan:
    """Returns the plan of one of our planners; the reference's plans are read, not made.

    Raises:
        PlanInfeasible: No plan keeps every SLO.
    """
    match planner:
        case "catenary":
            return plan_pools(problem, clock=time.perf_counter)
        case "np":
            return plan_without_partitioning(problem, clock=time.perf_counter)
        case "dart-r":
            return plan_dart_r(problem, clock=time.perf_counter)
        case "alpaserve":
            return plan_alpa_serve(problem, clock=time.perf_counter)
        case "reference":
            raise InvalidInput("planner", "the reference's plans are those of the data set")


def complete(problem: PoolingProblem, max_partitions: int | None) -> PoolingProblem:
    """Returns a task of our own making as the artifact would state it.

    The batch building time follows from the rate of a plan without partitions. It is left out where
    there is no such plan.
    """
    problem = replace(problem, max_partitions=max_partitions or DEFAULT_MAX_PARTITIONS)
    unbuilt = replace(
        problem, models=tuple(replace(each, batch_build_us_per_row=0.0) for each in problem.models)
    )
    try:
        plan = plan_without_partitioning(unbuilt)
    except PlanInfeasible:
        return unbuilt
    return with_batch_building(problem, {each.name: each.throughput_rps for each in plan.models})
