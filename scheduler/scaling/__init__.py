"""When a cluster should be planned anew: pure, events in and a decision out.

rates       how much load every model gets, exponentially weighted
demand      how much text is asked for, and whether chains should be composed anew for it
replanning  whether the shares of the models have moved far enough from what was planned for
"""

from scheduler.scaling.demand import DemandPolicy, SessionDemand, SessionLoad
from scheduler.scaling.rates import ArrivalRates
from scheduler.scaling.replanning import Replanning, ReplanPolicy, Shares, objective_at

__all__ = [
    "ArrivalRates",
    "DemandPolicy",
    "ReplanPolicy",
    "Replanning",
    "SessionDemand",
    "SessionLoad",
    "Shares",
    "objective_at",
]
