"""Decisions about when a cluster is planned anew and how large it is: pure functions of events.

workers     the number of workers that a model should have, and which agents these are
groups      the number of scheduler groups that a cluster needs
rates       the load of every model, exponentially weighted
demand      the demand for generated text, and whether chains should be composed anew for it
replanning  whether the shares of the models have moved far from the planned ones
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
