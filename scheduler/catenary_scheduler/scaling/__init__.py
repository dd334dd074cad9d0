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
