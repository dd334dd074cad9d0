"""Objectives: the quantity that a plan maximises or minimises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_services.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class MaxThroughput:
    """Objective: the largest load, shared by the models' weights, that the cluster carries."""


@dataclass(frozen=True, slots=True)
class LeastCost:
    """Objective: the cheapest GPUs that carry a given load."""

    load_rps: Mapping[str, float]
    """Requests per second of every model, by its name."""


@dataclass(frozen=True, slots=True)
class LeastGpus:
    """Objective: the fewest GPUs that carry a given load."""

    load_rps: Mapping[str, float]
    """Requests per second of every model, by its name."""


Objective = MaxThroughput | LeastCost | LeastGpus


def required_rates(problem: PoolingProblem, objective: LeastCost | LeastGpus) -> list[float]:
    """Returns the load of each model in the problem's order.

    Raises InvalidInput for an unknown model, or a load that is missing or not positive.
    """
    names = {model.name for model in problem.models}
    for name in objective.load_rps:
        if name not in names:
            raise InvalidInput("load_rps", f"{name} is not a model of this problem")
    rates = []
    for model in problem.models:
        rate = objective.load_rps.get(model.name)
        if rate is None or not 0 < rate < float("inf"):
            raise InvalidInput("load_rps", f"{model.name} needs a positive load")
        rates.append(rate)
    return rates


def price_per_gpu(problem: PoolingProblem, objective: Objective) -> list[float]:
    """Returns the price of a GPU of each class under an objective.

    For throughput GPUs have no price, so each counts as its share of the class, which breaks ties.
    """
    if isinstance(objective, LeastCost):
        return [gpu.cost_per_hour for gpu in problem.classes]
    if isinstance(objective, LeastGpus):
        return [1.0 for _ in problem.classes]
    return [1.0 / max(gpu.count, 1) for gpu in problem.classes]
