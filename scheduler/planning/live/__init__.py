"""The pooled planner on a cluster that is there: from agents to a problem, from a plan to agents.

groups     agents that are alike; what the planner calls a class of GPUs
profiles   block times of every model on every group, corrected by what agents measured
problem    all of it as a `PoolingProblem`, or `PlanInfeasible` saying what is not known
place      a `PooledPlan` on the agents, moving as little as possible
"""

from scheduler.planning.live.groups import DeviceGroup, device_groups
from scheduler.planning.live.place import Hosted, place
from scheduler.planning.live.problem import (
    LiveCluster,
    LiveModel,
    PlanningRules,
    pooling_problem,
    with_batch_building,
)
from scheduler.planning.live.profiles import MeasuredTimes, estimated, unknown

__all__ = [
    "DeviceGroup",
    "Hosted",
    "LiveCluster",
    "LiveModel",
    "MeasuredTimes",
    "PlanningRules",
    "device_groups",
    "estimated",
    "place",
    "pooling_problem",
    "unknown",
    "with_batch_building",
]
