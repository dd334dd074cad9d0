"""Decisions about when a cluster is planned anew and how large it is: pure functions of events.

workers     how many workers a model should have, and which agents these are
groups      how many scheduler groups a cluster needs
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
