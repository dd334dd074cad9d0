"""When a cluster should be planned anew: pure, events in and a decision out.

rates       how much load every model gets, exponentially weighted
replanning  whether the shares of the models have moved far enough from what was planned for
"""

from scheduler.scaling.rates import ArrivalRates
from scheduler.scaling.replanning import Replanning, ReplanPolicy, Shares, objective_at

__all__ = ["ArrivalRates", "ReplanPolicy", "Replanning", "Shares", "objective_at"]
