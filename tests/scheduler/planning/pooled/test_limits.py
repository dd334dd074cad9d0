"""Plans of any cluster within a limit of time, with a bound that no plan passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning.pooled import LeastGpus, MaxThroughput, plan_pools
from catenary_scheduler.planning.pooled.columns.candidates import candidates_of
from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.selection import used_gpus
from catenary_scheduler.planning.pooled.dataset import PlanningDataset
from catenary_scheduler.planning.pooled.problem import GpuClass, PooledModel, PoolingProblem
from catenary_scheduler.planning.pooled.solving.milp import MilpTask
from catenary_scheduler.planning.pooled.solving.paths import least_price
from catenary_scheduler.planning.pooled.solving.relaxation import relax
from catenary_scheduler.planning.pooled.solving.rounding import rounded
from catenary_scheduler.planning.pooled.solving.shares import cheapest_shares, share_of
from catenary_services.errors import PlanInfeasible
from scheduling_cases.pooled_problems import (
    assert_keeps_the_rules,
    best_free_rates,
    best_objective,
    random_problem,
)

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PRICES = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=2).map(np.array)


class Ticks:
    """A clock that goes on by one step whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.reads * self.step_s


@st.composite
def problems(draw: st.DrawFn, models: int = 2) -> PoolingProblem:
    return random_problem(
        draw(st.integers(0, 10_000)), models=models, most_gpus=4, max_partitions=3
    )


def _columns(problem: PoolingProblem, model: PooledModel) -> PipelineColumns:
    return candidates_of(problem, model).pruned


@FEW
@given(problems(models=1), PRICES, st.floats(0.05, 1.0), st.integers(1, 2))
def test_the_cheapest_share_is_the_one_that_trying_everything_finds(
    problem: PoolingProblem, prices: np.ndarray, part: float, effort: int
) -> None:
    (model,) = problem.models
    rates = best_free_rates(problem, model, share=False)
    rate = part * max(rates.values())
    columns = _columns(problem, model)
    if not rate or not len(columns):
        return
    counts = np.array([gpu.count for gpu in problem.classes])
    found = cheapest_shares(columns, counts, prices, rate, effort)
    cheapest = min(prices @ cell for cell, most in rates.items() if most >= rate * (1 - 1e-9))
    assert found.least_cost <= cheapest
    if cheapest <= (prices * counts).min():  # nothing cheaper has more GPUs than there are
        # With effort enough for a pipeline on every GPU nothing is left out.
        exact = cheapest_shares(columns, counts, prices, rate, int(counts.sum()))
        assert exact.least_cost == pytest.approx(cheapest)
        assert min(prices @ share.gpus for share in exact.shares) == pytest.approx(cheapest)
    for share in found.shares:
        chosen = share.chosen(columns)
        assert tuple(used_gpus([chosen], 2)) == share.gpus
        reached = sum(pipeline.throughput_rps for pipeline in chosen)
        assert reached >= share.rate * (1 - 1e-9)
        assert share.rate >= rate * (1 - 1e-8)
        assert share_of(chosen, 2).gpus == share.gpus


@FEW
@given(problems(), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_the_limit_binds_and_the_bound_holds_whenever_time_is_up(
    problem: PoolingProblem, step_s: float, limit_s: float
) -> None:
    tables = [best_free_rates(problem, model, share=False) for model in problem.models]
    best = best_objective(problem, tables)
    clock = Ticks(step_s)
    try:
        plan = plan_pools(problem, solver="highs", time_limit_s=limit_s, clock=clock)
    except PlanInfeasible:
        plan = None
    # Whatever is begun after the limit reads the clock a few times for each model and ends.
    most = 3 * len(problem.models) + 10
    if step_s > 0:
        assert clock.reads <= limit_s / step_s + most
    if plan is None:
        # With time enough there is a plan if there can be one.
        assert not best or clock.reads * step_s >= limit_s
        return
    assert_keeps_the_rules(problem, plan)
    assert plan.objective <= best * (1 + 1e-8)
    assert plan.bound >= best * (1 - 1e-8)


@FEW
@given(problems(models=1), PRICES, st.booleans())
def test_no_pipeline_is_cheaper_than_the_shortest_path(
    problem: PoolingProblem, prices: np.ndarray, in_time: bool
) -> None:
    (model,) = problem.models
    columns = _columns(problem, model)
    least = least_price(problem, model, prices, lambda: float(in_time))
    if len(columns):
        price = np.where(columns.gpu_class >= 0, prices[columns.gpu_class], 0.0)
        assert least <= (price / columns.rate_per_gpu).sum(axis=1).min() * (1 + 1e-9)
    later = least_price(problem, model, prices, lambda: 1.0)
    assert later >= least


def test_models_that_were_not_enumerated_in_time_have_a_bound_too(ppipe: PlanningDataset) -> None:
    problem = _larger(ppipe, 10)
    full = plan_pools(problem, solver="highs", time_limit_s=1.0)
    # Time is up after the first model, so the others have the shortest pipelines.
    reads = Ticks(1.0)
    plan = plan_pools(problem, solver="highs", time_limit_s=4.0, clock=reads)
    assert_keeps_the_rules(problem, plan)
    assert 0 < plan.objective <= full.bound
    assert plan.bound >= full.objective
    assert not plan.optimal


def test_rounding_loses_no_more_than_three_gpus_for_each_model_and_class(
    ppipe: PlanningDataset,
) -> None:
    for factor in (10, 1000):
        problem = _larger(ppipe, factor)
        columns = [_columns(problem, model) for model in problem.models]
        task = MilpTask(problem, columns, MaxThroughput(), None)
        relaxation = relax(task)
        assert relaxation is not None
        chosen = rounded(task, [flow * 1.0 for flow in relaxation.flows])
        assert chosen is not None
        value = min(
            sum(each.throughput_rps for each in pipelines) / model.weight
            for model, pipelines in zip(problem.models, chosen, strict=True)
        )
        # Each of the pipelines of a basic solution has up to three pools, each rounded by a GPU.
        pools = 3 * (len(problem.models) + len(problem.classes))
        least = min(gpu.count for gpu in problem.classes)
        assert value >= -relaxation.bound * (1 - pools / least)


def test_more_models_than_gpus_are_refused_at_once(ppipe: PlanningDataset) -> None:
    (model, *_) = ppipe.problem("maf19/0.3-0.33-0.37/G1/HC1-L").models
    many = tuple(replace(model, name=f"m{index}") for index in range(300))
    problem = replace(ppipe.problem("maf19/0.3-0.33-0.37/G1/HC1-L"), models=many)
    clock = Ticks(1.0)
    with pytest.raises(PlanInfeasible, match="290 more models together"):
        plan_pools(problem, clock=clock)
    assert clock.reads <= 3


def test_models_that_take_more_gpus_than_there_are_need_no_search() -> None:
    # Each of three models needs a GPU of a class that has two.
    times = {("a", 1): np.full((1, 1), 1000.0)}
    models = tuple(PooledModel(f"m{at}", 1, times, (0, 0), slo_us=2000.0) for at in range(3))
    crowded = PoolingProblem((GpuClass("a", 2), GpuClass("b", 9)), models)
    clock = Ticks(0.0)
    with pytest.raises(PlanInfeasible, match="together") as caught:
        plan_pools(crowded, solver="highs", clock=clock)
    assert caught.value.details["constraint"] == "gpus"
    assert clock.reads < 20


def test_the_reason_for_a_no_is_sought_within_the_limit(ppipe: PlanningDataset) -> None:
    problem = ppipe.problem("maf19/0.3-0.33-0.37/G1/HC1-L")
    load = {model.name: 1e9 for model in problem.models}
    with pytest.raises(PlanInfeasible, match="would serve"):
        plan_pools(problem, objective=LeastGpus(load))
    clock = Ticks(1.0)
    with pytest.raises(PlanInfeasible, match="together"):
        plan_pools(
            problem, solver="highs", objective=LeastGpus(load), time_limit_s=2.0, clock=clock
        )
    assert clock.reads < 12


def _larger(ppipe: PlanningDataset, factor: int) -> PoolingProblem:
    small = ppipe.problem("maf19/0.3-0.33-0.37/G3/HC4-L")
    classes = tuple(replace(gpu, count=gpu.count * factor) for gpu in small.classes)
    return replace(small, classes=classes)
