"""The reference's plans, served in simulation."""

from __future__ import annotations

import pytest

from catenary_lab.pools.reactive import ReactiveDispatcher
from catenary_lab.pools.reference import reference_plan
from catenary_scheduler.dispatch import PooledDispatcher
from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from catenary_simulator import GammaArrivals, SimulationOptions, SimulationResult, simulate
from catenary_simulator.options import DispatcherFactory
from reference_data import reference


@pytest.fixture(scope="module")
def data() -> PlanningDataset:
    return load_dataset(reference("ppipe"))


def served(
    data: PlanningDataset,
    instance: str,
    load: float,
    duration_s: float,
    dispatcher: DispatcherFactory = PooledDispatcher,
    scheduler: str = "v4",
    cv: float = 1.0,
) -> SimulationResult:
    problem = data.problem(instance)
    rates = data.instance(instance).reference["v4"]["xput_rps"]
    base = {model.name: rate for model, rate in zip(problem.models, rates, strict=True)}
    options = SimulationOptions(
        base, load, duration_s, arrivals=GammaArrivals(cv), dispatcher=dispatcher
    )
    return simulate(problem, reference_plan(data, instance, scheduler), options)


def test_every_plan_of_the_reference_can_be_laid_out_and_served(data: PlanningDataset) -> None:
    assert len(data.plans) > 0
    for instance, scheduler in data.plans:
        result = served(data, instance, 0.3, 0.1, scheduler=scheduler)
        assert all(model.requests > 0 for model in result.models), instance
        assert all(model.attainment > 0.9 for model in result.models), (instance, scheduler)


@pytest.mark.parametrize("instance", ["G1/HC1-L", "G1/HC2-L", "G3/HC3-L", "G5/HC4-L"])
def test_nearly_all_of_the_promised_rate_is_served(data: PlanningDataset, instance: str) -> None:
    result = served(data, f"maf19/0.3-0.33-0.37/{instance}", 0.9, 2.0)
    assert min(model.attainment for model in result.models) >= 0.99


def test_with_little_margin_reservations_serve_what_reaction_does_not(
    data: PlanningDataset,
) -> None:
    reserved = served(data, "ablation/encnet/HC2-L", 0.85, 1.0).models[0]
    reactive = served(data, "ablation/encnet/HC2-L", 0.85, 1.0, ReactiveDispatcher).models[0]
    assert reserved.attainment >= 0.99
    assert reactive.attainment < 0.95


def test_pipelines_serve_more_of_a_burst_than_whole_models(data: PlanningDataset) -> None:
    instance = "maf19/0.3-0.33-0.37/G1/HC1-L"
    whole = served(data, instance, 0.6, 2.0, scheduler="bl", cv=2.0)
    ours = served(data, instance, 0.6, 2.0, cv=2.0)
    assert min(model.attainment for model in ours.models) >= 0.99
    assert min(model.attainment for model in whole.models) < 0.97
