"""Planner of pooled pipelines (PPipe, sections 4 and 5, and appendix A).

problem, objectives      what is asked and what is answered
dataset                  problems from files in the format of the reference data
timing                   how long partitions take and how fast their pools are
columns                  every pipeline that keeps the SLO, and what a model gets of whole GPUs
rules                    the best rate of a model by whole GPUs, under our own rules
solving                  divides the GPUs among the models: a dynamic programme, or HiGHS
assembly, explain, infeasible
                         pipelines with pools, what they promise, in words, and why there are none
planner                  `plan_pools`
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
