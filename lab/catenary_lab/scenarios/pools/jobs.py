"""Jobs of scenarios of pooled pipelines: a plan, a load, and the figures to find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from catenary_lab.pools import compared
from catenary_lab.pools.problems import single_model, with_gpus
from catenary_lab.pools.reactive import ReactiveDispatcher
from catenary_lab.pools.reference import reference_plan
from catenary_lab.scenarios.pools.fluid_bound import fluid_bound
from catenary_scheduler.dispatch import PooledDispatcher
from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_scheduler.planning.pooled.shared_routes import with_shared_routes
from catenary_services.errors import PlanInfeasible
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.load_factor import Search, search
from catenary_simulator.options import DispatcherFactory, Disturbance, SimulationOptions
from catenary_simulator.pools import OWN_MARGIN, reference_rates, with_margin
from catenary_simulator.result import ModelResult
from catenary_simulator.simulate import SimulationSetup, run, set_up

Dispatch = Literal["reservation", "reactive"]
_DISPATCHERS: dict[Dispatch, DispatcherFactory] = {
    "reservation": PooledDispatcher,
    "reactive": ReactiveDispatcher,
}


@dataclass(frozen=True, slots=True)
class OfInstance:
    """The planning task of an instance of the data set."""

    instance: str

    def problem(self, dataset: PlanningDataset, max_partitions: int | None) -> PoolingProblem:
        """Returns the task."""
        return dataset.problem(self.instance, max_partitions)


@dataclass(frozen=True, slots=True)
class OfModel:
    """The task of serving one model on a small cluster."""

    cluster: str
    model: str
    gpus: tuple[int, ...]
    slo_scale: float
    margin: float

    def problem(self, dataset: PlanningDataset, max_partitions: int | None) -> PoolingProblem:
        """Returns the task."""
        problem = single_model(
            dataset, self.cluster, self.model, slo_scale=self.slo_scale, margin=self.margin
        )
        names = [each.name for each in problem.classes]
        problem = with_gpus(problem, dict(zip(names, self.gpus, strict=True)))
        return compared.complete(problem, max_partitions)


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice of a plan for a task."""

    dataset: Path
    task: OfInstance | OfModel
    planner: compared.Planner
    max_partitions: int | None = None
    margin: float | None = None
    """Margin of our planner on an instance; None: its usual one."""
    shared: bool = False
    """True if models have routes through the pools of others, too."""


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals of one run. Rates at load factor 1 are the reference's, or those of a plan."""

    arrivals: str
    base: Literal["reference", "own", "catenary"]
    duration_s: float
    seed: int
    noise: float = 0.0
    """Coefficient of variation of compute and transfer times."""


@dataclass(frozen=True, slots=True)
class Served:
    """Figures of the models of a run (or of a search, then at the factors found)."""

    models: tuple[ModelResult, ...]
    base_rps: Mapping[str, float]
    utilisation: Mapping[str, float]
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Load factors that no scheduler exceeds on the plan, by model; of a search only."""


@dataclass(frozen=True, slots=True)
class LoadFactorJob:
    """Looks for the largest load factors."""

    plan: Plan
    load: Load
    dispatch: Dispatch
    search: Search
    feasible: bool = True
    """Whether there must be a plan; otherwise a result without figures means that there is none."""

    def run(self) -> Served:
        try:
            setting, options = prepared(self.plan, self.load, self.dispatch)
        except PlanInfeasible:
            if self.feasible:
                raise
            return Served((), {}, {})
        found = search(setting, options, self.search)
        models = tuple(found.models[model.model.name] for model in setting.plan.models)
        bounds = fluid_bound(setting, options, self.search)
        return Served(models, options.base_rps, found.utilisation, bounds)


@dataclass(frozen=True, slots=True)
class AttainmentJob:
    """Serves one load factor."""

    plan: Plan
    load: Load
    dispatch: Dispatch
    factor: float

    def run(self) -> Served:
        setting, options = prepared(self.plan, self.load, self.dispatch)
        result = run(setting, replace(options, load=self.factor))
        return Served(result.models, options.base_rps, result.utilisation)


def prepared(
    plan: Plan, load: Load, dispatch: Dispatch
) -> tuple[SimulationSetup, SimulationOptions]:
    """Returns the plan, laid out, and the options of its run."""
    setting = _setting(plan)
    names = [model.model.name for model in setting.plan.models]
    base = base_rps(plan, load.base)
    options = SimulationOptions(
        {name: base[name] for name in names},
        1.0,
        load.duration_s,
        load.seed,
        parse_arrivals(load.arrivals),
        _DISPATCHERS[dispatch],
        Disturbance(compute_cv=load.noise, transfer_cv=load.noise),
    )
    return setting, options


def base_rps(plan: Plan, base: Literal["reference", "own", "catenary"]) -> dict[str, float]:
    """Returns the rates at load factor 1."""
    dataset = dataset_at(plan.dataset)
    if base == "reference":
        assert isinstance(plan.task, OfInstance)
        return reference_rates(dataset, plan.task.instance)
    if base == "catenary":
        plan = replace(plan, planner="catenary")
    problem, made = planned(plan)
    return {model.name: model.weight * made.objective for model in problem.models}


@lru_cache(maxsize=4)
def dataset_at(folder: Path) -> PlanningDataset:
    """Returns the data set of a folder, read once."""
    return load_dataset(folder)


@lru_cache(maxsize=512)
def planned(plan: Plan) -> tuple[PoolingProblem, PooledPlan]:
    """Returns a plan and its task, made once."""
    if plan.shared:
        problem, own = planned(replace(plan, shared=False))
        return problem, with_shared_routes(problem, own)
    dataset = dataset_at(plan.dataset)
    problem = plan.task.problem(dataset, plan.max_partitions)
    if plan.planner == "reference":
        assert isinstance(plan.task, OfInstance)
        return problem, reference_plan(dataset, plan.task.instance)
    if plan.planner == "catenary" and isinstance(plan.task, OfInstance):
        margin = OWN_MARGIN if plan.margin is None else plan.margin
        problem = with_margin(problem, margin)
    return problem, compared.make(problem, plan.planner)


@lru_cache(maxsize=64)
def _setting(plan: Plan) -> SimulationSetup:
    setting = set_up(*planned(plan))
    return with_equal_rights(setting) if plan.planner == "alpaserve" else setting


def with_equal_rights(setting: SimulationSetup) -> SimulationSetup:
    """Returns a setup in which models that share pools have the same right to them."""
    models = tuple(
        replace(model, pipelines=tuple(replace(each, is_shared=False) for each in model.pipelines))
        for model in setting.plan.models
    )
    return replace(setting, plan=replace(setting.plan, models=models))
