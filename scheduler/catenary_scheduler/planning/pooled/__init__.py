"""Planner of pooled pipelines (PPipe, sections 4 and 5, and appendix A).

problem, objectives      the task, its answer, and the quantity that a plan optimises
dataset                  problems from files in the format of the reference data
timing                   latencies of partitions, and rates of their pools
columns                  every pipeline that keeps the SLO, and a model's rates by whole GPUs
rules                    the best rate of a model by whole GPUs, under our own rules
solving                  division of the GPUs among the models: a dynamic programme, or HiGHS
assembly, explain, infeasible
                         the plan and its promises, the same in words, and errors without a plan
planner                  the entry point `plan_pools`
layout                   virtual GPUs on physical ones, and these on servers
"""

from catenary_scheduler.planning.pooled.explain import explain_plan
from catenary_scheduler.planning.pooled.objectives import (
    LeastCost,
    LeastGpus,
    MaxThroughput,
    Objective,
)
from catenary_scheduler.planning.pooled.planner import plan_pools

__all__ = ["LeastCost", "LeastGpus", "MaxThroughput", "Objective", "explain_plan", "plan_pools"]
