"""When a cluster should be planned anew, and how large it should be: pure, decisions from events.

autoscaling    how many workers a model should have
workers_line   how many a rate of arrivals needs (eq. 7), learned
change_points  when a rate, or the lengths of sessions, are no longer what they were
retiring       how many agents that takes, and which of them may go
rates       how much load every model gets, exponentially weighted
demand      how much text is asked for, and whether chains should be composed anew for it
replanning  whether the shares of the models have moved far enough from what was planned for
"""

from catenary_scheduler.scaling.demand import DemandPolicy, SessionDemand, SessionLoad
from catenary_scheduler.scaling.rates import ArrivalRates
from catenary_scheduler.scaling.replanning import LoadReplanning, ReplanPolicy, Shares, objective_at
from catenary_scheduler.scaling.workers.autoscaling import ModelScaling
from catenary_scheduler.scaling.workers.model_workers import (
    ModelWorkers,
    agents_wanted,
    last_of_each,
    next_to_go,
)
from catenary_scheduler.scaling.workers.worker_statistics import ScalingPolicy, WorkerStatistics
from catenary_scheduler.scaling.workers.workers_line import SessionLengths, WorkersLine

__all__ = [
    "ArrivalRates",
    "DemandPolicy",
    "LoadReplanning",
    "ModelScaling",
    "ModelWorkers",
    "ReplanPolicy",
    "ScalingPolicy",
    "SessionDemand",
    "SessionLengths",
    "SessionLoad",
    "Shares",
    "WorkerStatistics",
    "WorkersLine",
    "agents_wanted",
    "last_of_each",
    "next_to_go",
    "objective_at",
]
