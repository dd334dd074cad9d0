"""The largest load at which a plan keeps its SLOs, as the paper and the reference measure it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_simulator.options import SimulationOptions
from catenary_simulator.result import ModelResult
from catenary_simulator.simulate import SimulationSetup, run, set_up

TARGET = 0.99
STEP = 0.05


def max_load_factor(
    problem: PoolingProblem, plan: PooledPlan, options: SimulationOptions, target: float = TARGET
) -> Mapping[str, ModelResult]:
    """Returns the figures of each model at the largest load factor with enough requests in time.

    Load factors are tried from `options.load` down in steps of 0.05, the same for all models, until
    every model has had a run with a share of `target` of its requests in time. A model without
    such a run gets the figures of a run with load factor 0, which is empty.
    """
    return search(set_up(problem, plan), options, target)


def search(
    setting: SimulationSetup, options: SimulationOptions, target: float = TARGET
) -> Mapping[str, ModelResult]:
    """Searches like `max_load_factor`, on a cluster that is set up already."""
    found: dict[str, ModelResult] = {}
    steps = round(options.load / STEP)
    for step in range(steps, -1, -1):
        result = run(setting, replace(options, load=round(step * STEP, 2)))
        for model in result.models:
            if model.attainment >= target and model.name not in found:
                found[model.name] = model
        if len(found) == len(result.models):
            break
    return found
