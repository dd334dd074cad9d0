"""HiGHS as an independent check of the dynamic programme, and for what that cannot do."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from catenary_lab.pools.artifact.solving import solve_by_reference_rules
from catenary_scheduler.planning.pooled import LeastCost, LeastGpus, MaxThroughput, plan_pools
from catenary_scheduler.planning.pooled.columns.axes import axes_of
from catenary_scheduler.planning.pooled.columns.candidates import candidates_of
from catenary_scheduler.planning.pooled.dataset import PlanningDataset
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.pooled.rules.free_rules import FreeRateTable
from catenary_scheduler.planning.pooled.solving.exact import solve_exactly
from catenary_scheduler.planning.pooled.solving.highs import SolverLimits, solve_with_highs
from catenary_scheduler.planning.pooled.solving.milp import MilpTask
from scheduling_cases.pooled_problems import assert_keeps_the_rules, random_problem

EXACTLY = SolverLimits(lambda: 20.0, gap=1e-8)


def _on_whole_gpus(problem: PoolingProblem) -> tuple[float, float]:
    """The objective by the dynamic programme without shared GPUs, and by HiGHS."""
    candidates = [candidates_of(problem, model) for model in problem.models]
    axes = axes_of(problem)
    tables = [FreeRateTable(per_model, axes, share=False) for per_model in candidates]
    exact = solve_exactly(problem, tables, axes, MaxThroughput(), None)
    task = MilpTask(problem, [each.pruned for each in candidates], MaxThroughput(), None)
    found = solve_with_highs(task, EXACTLY)
    if found is not None:
        assert found.optimal
        assert found.bound >= found.objective
    return exact.objective if exact else 0.0, found.objective if found else 0.0


@pytest.mark.parametrize("seed", range(12))
def test_highs_equals_the_dynamic_programme_on_whole_gpus(seed: int) -> None:
    problem = random_problem(seed, models=2, most_gpus=6, max_partitions=3)
    exact, found = _on_whole_gpus(problem)
    assert found == pytest.approx(exact, rel=1e-6)


def test_highs_equals_the_dynamic_programme_on_a_reference_instance(ppipe: PlanningDataset) -> None:
    exact, found = _on_whole_gpus(ppipe.problem("maf19/0.3-0.33-0.37/G2/HC2-L"))
    assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("seed", range(100, 108))
def test_highs_equals_the_search_of_slots_under_the_reference_rules(seed: int) -> None:
    problem = random_problem(seed, models=1, most_gpus=4)
    exact = plan_pools(problem, solve=solve_by_reference_rules, solver="dp")
    found = plan_pools(problem, solve=solve_by_reference_rules, solver="highs")
    # HiGHS stops at a gap of 1e-4 and its bound holds for both.
    assert found.objective == pytest.approx(exact.objective, rel=2e-4)
    assert exact.objective <= found.bound * (1 + 1e-6)
    assert_keeps_the_rules(problem, found)


@pytest.mark.parametrize("seed", range(200, 206))
@pytest.mark.parametrize("goal", [LeastCost, LeastGpus])
def test_both_solvers_find_the_least_price_for_a_load(
    seed: int, goal: type[LeastCost] | type[LeastGpus]
) -> None:
    problem = random_problem(seed, models=2, most_gpus=4, levels=(1,))
    most = plan_pools(problem)
    load = goal({served.name: 0.6 * served.throughput_rps for served in most.models})
    exact = plan_pools(problem, objective=load, solver="dp")
    found = plan_pools(problem, objective=load, solver="highs")
    assert found.objective == pytest.approx(exact.objective, rel=1e-6)
    for plan in (exact, found):
        assert_keeps_the_rules(problem, plan)
        for served in plan.models:
            assert served.throughput_rps >= load.load_rps[served.name] * (1 - 1e-8)


def test_three_classes_are_planned_and_checked() -> None:
    problem = random_problem(3, classes=3, models=2, most_gpus=3)
    exact = plan_pools(problem, solver="dp")
    found = plan_pools(problem, solver="highs")
    assert_keeps_the_rules(problem, exact)
    assert_keeps_the_rules(problem, found)
    assert found.objective <= exact.objective * (1 + 1e-6)  # which may share GPUs besides


def test_four_large_classes_take_highs_within_its_limit(ppipe: PlanningDataset) -> None:
    one = ppipe.problem("maf19/0.3-0.33-0.37/G2/HC2-L")
    other = ppipe.problem("maf19/0.3-0.33-0.37/G2/HC3-L")
    problem = replace(one, classes=one.classes + other.classes, max_partitions=2)
    begun = time.process_time()  # beside its 2 s, whatever else the machine does
    plan = plan_pools(problem, time_limit_s=2.0, clock=time.perf_counter)
    assert time.process_time() - begun < 8.0
    assert plan.solver == "highs"
    assert plan.bound >= plan.objective
    assert_keeps_the_rules(problem, plan)


@pytest.mark.parametrize("factor", [10, 1000])
def test_large_clusters_report_an_honest_gap(ppipe: PlanningDataset, factor: int) -> None:
    small = ppipe.problem("maf19/0.3-0.33-0.37/G3/HC4-L")
    classes = tuple(replace(gpu, count=gpu.count * factor) for gpu in small.classes)
    problem = replace(small, classes=classes)
    plan = plan_pools(problem, time_limit_s=2.0, clock=time.perf_counter)
    assert plan.solver == "highs"
    assert plan.objective <= plan.bound <= plan.objective * 1.01
    assert plan.objective >= plan_pools(small).objective * factor
    assert_keeps_the_rules(problem, plan)


def test_a_gap_left_open_is_not_called_optimal(ppipe: PlanningDataset) -> None:
    problem = ppipe.problem("maf19/0.3-0.33-0.37/G1/HC1-L")
    plan = plan_pools(problem, solver="highs", time_limit_s=0.0)
    assert plan.optimal == (plan.bound <= plan.objective * (1 + 1e-4))
    assert not plan.optimal
    assert plan.bound > plan_pools(problem, solver="dp").objective * (1 - 1e-9)
