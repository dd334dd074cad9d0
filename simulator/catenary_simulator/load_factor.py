"""The largest load at which a plan keeps its SLOs, as the paper and the reference measure it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import floor

from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.domain.plan import ModelPlan, Stage
from catenary_simulator.options import SimulationOptions
from catenary_simulator.result import ModelResult
from catenary_simulator.simulate import SimulationSetup, run, set_up

TARGET = 0.99
STEP = 0.05
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Search:
    """The load factors that a search tries: from `highest` down in steps of `step`."""

    target: float = TARGET
    highest: float = 1.0
    step: float = STEP

    def factors(self, at_most: float) -> Iterator[float]:
        """Yields the factors to try, the largest first; the last is 0, which is no load."""
        top = min(self.highest, at_most)
        for number in range(floor(top / self.step + _ROUNDING), -1, -1):
            yield round(number * self.step, 6)


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search."""

    models: Mapping[str, ModelResult]
    """Figures of each model at its largest load factor with enough of its requests in time."""
    utilisation: Mapping[str, float]
    """Utilisation of each GPU class, 0 to 1, at the smallest of these load factors."""


def max_load_factor(
    problem: PoolingProblem, plan: PooledPlan, options: SimulationOptions, target: float = TARGET
) -> Mapping[str, ModelResult]:
    """Returns the figures of each model at the largest load factor with enough requests in time.

    The search goes from `options.load` down in steps of 0.05, the same for all models, until every
    model has had a run with `target` of its requests in time. A model that never has gets the
    figures of a run with load factor 0, which is empty.
    """
    return search(set_up(problem, plan), options, Search(target, options.load)).models


def search(setting: SimulationSetup, options: SimulationOptions, wanted: Search) -> Found:
    """Returns the largest load factors; all models are always offered the same factor.

    Factors that ask for more than the devices can compute are passed over without a run.
    """
    found: dict[str, ModelResult] = {}
    utilisation: Mapping[str, float] = dict.fromkeys(setting.gpus, 0.0)
    for factor in wanted.factors(_ceiling(setting, options, wanted.target)):
        result = run(setting, replace(options, load=factor))
        reached = {each.name: each for each in result.models if each.attainment >= wanted.target}
        found = {**reached, **found}
        if len(found) == len(result.models):
            utilisation = result.utilisation
            break
    return Found(found, utilisation)


def capacity_rps(model: ModelPlan) -> float:
    """Returns a rate no schedule can exceed: every pipeline's slowest pool, at its best batch."""
    return sum(
        min(pool_rps(stage, pipeline.batch_size) for stage in pipeline.stages)
        for pipeline in model.pipelines
    )


def pool_rps(stage: Stage, batch: int) -> float:
    """Returns the rate that a pool cannot exceed with batches of up to a size."""
    rows_per_ns = max(rows / stage.compute_ns[rows - 1] for rows in range(1, batch + 1))
    return len(stage.agents) * rows_per_ns * NANOSECONDS_PER_SECOND


def _ceiling(setting: SimulationSetup, options: SimulationOptions, target: float) -> float:
    """Returns a load factor no model can serve.

    A model counts as if it had the pools of its shared routes for itself; its own pools are its
    own. What is queued when the run ends may still be answered: one SLO's worth.
    """
    highest = 0.0
    for model in setting.plan.models:
        seconds = options.duration_s + model.slo_ns / NANOSECONDS_PER_SECOND
        most = capacity_rps(model) * seconds / options.duration_s / target
        highest = max(highest, most / max(options.base_rps[model.model.name], _ROUNDING))
    # The offered load is random: leave room for a run with fewer arrivals than expected.
    return highest * 1.05
