"""Plans of pooled pipelines (PPipe, sections 4 and 5, and appendix A).

problem, objectives      what is asked and what is answered
dataset, reference       problems and recorded plans from files in the format of the reference data
timing, device_tables    how long partitions take and how fast their pools are
columns, pruning         every pipeline that keeps the SLO, without those another makes superfluous
tables, closure, halves, sharing, free_rules
                         the best rate of a model by whole GPUs, under our own rules
slots, sums, reference_rules, slot_sums
                         the same under the rules of PPipe's artifact
coupling, exact          divides the GPUs among the models: the dynamic programme's last step
milp, sparse, relaxation, rounding, highs, large
                         the same choice for HiGHS: big clusters, many classes, checks
selection, assembly, explain, infeasible
                         pipelines with pools, what they promise, in words, and why there are none
planner, solving, baselines
                         `plan_pools`, which solver takes what, and what we compare with
layout, physical, neighbours
                         virtual GPUs on physical ones, and these on servers
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
