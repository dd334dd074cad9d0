"""When a cluster should be planned anew, and how large it should be: pure, decisions from events.

workers     how many workers a model should have, and which agents these are
groups      how many scheduler groups a cluster needs
rates       how much load every model gets, exponentially weighted
demand      how much text is asked for, and whether chains should be composed anew for it
replanning  whether the shares of the models have moved far enough from what was planned for
"""

from catenary_scheduler.scaling.demand import DemandPolicy, SessionDemand, SessionLoad
from catenary_scheduler.scaling.rates import ArrivalRates
from catenary_scheduler.scaling.replanning import Replanning, ReplanPolicy, Shares, objective_at
from catenary_scheduler.scaling.workers.autoscaling import ModelScaling
from catenary_scheduler.scaling.workers.retiring import (
    Crew,
    agents_wanted,
    last_of_each,
    next_to_go,
)
from catenary_scheduler.scaling.workers.worker_facts import ScalingPolicy, WorkerFacts
from catenary_scheduler.scaling.workers.workers_line import Lengths, WorkersLine

__all__ = [
    "ArrivalRates",
    "Crew",
    "DemandPolicy",
    "Lengths",
    "ModelScaling",
    "ReplanPolicy",
    "Replanning",
    "ScalingPolicy",
    "SessionDemand",
    "SessionLoad",
    "Shares",
    "WorkerFacts",
    "WorkersLine",
    "agents_wanted",
    "last_of_each",
    "next_to_go",
    "objective_at",
]
