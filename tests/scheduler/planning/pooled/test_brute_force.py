"""Every algorithm against a twin that tries everything, on tiny problems."""

from __future__ import annotations

import pytest

from catenary_lab.pools.artifact.solving import solve_by_reference_rules
from catenary_scheduler.planning.pooled import plan_pools
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.errors import PlanInfeasible
from scheduling_cases.pooled_problems import (
    assert_keeps_the_rules,
    best_free_rates,
    best_objective,
    best_reference_rates,
    random_problem,
)

BLOCKS_OF_SEEDS = [range(start, start + 50) for start in range(0, 600, 50)]


def _plan_or_none(problem: PoolingProblem, **options: object) -> PooledPlan | None:
    try:
        return plan_pools(problem, solver="dp", **options)  # type: ignore[arg-type]
    except PlanInfeasible:
        return None


def _varied(seed: int) -> PoolingProblem:
    return random_problem(
        seed,
        models=1 + seed % 2,
        levels=[(1, 2), (1, 2, 3), (1, 2, 4)][seed % 3],
        most_gpus=3,
        blocks=2 + seed % 2,
        max_partitions=2 + (seed % 5 == 0),
        classes=1 + (seed % 7 > 0),
    )


@pytest.mark.parametrize("seeds", BLOCKS_OF_SEEDS, ids=str)
def test_the_dynamic_programme_finds_what_trying_everything_finds(seeds: range) -> None:
    for seed in seeds:
        problem = _varied(seed)
        best = best_objective(problem, [best_free_rates(problem, m) for m in problem.models])
        plan = _plan_or_none(problem)
        if plan is None:
            assert best == 0.0, seed
            continue
        assert plan.objective == pytest.approx(best, rel=1e-8), seed
        assert plan.bound == plan.objective
        assert plan.optimal
        assert_keeps_the_rules(problem, plan)


@pytest.mark.parametrize("start", range(0, 150, 25))
def test_the_reference_rules_find_what_trying_everything_finds(start: int) -> None:
    for seed in range(start, start + 25):
        problem = random_problem(
            seed, models=1, most_gpus=2, levels=[(1, 2), (1, 2, 4), (1, 2, 3)][seed % 3], blocks=2
        )
        table = best_reference_rates(problem, problem.models[0])
        plan = _plan_or_none(problem, solve=solve_by_reference_rules)
        if plan is None:
            assert max(table.values()) == 0.0, seed
            continue
        assert plan.objective * problem.models[0].weight == pytest.approx(
            max(table.values()), rel=1e-8
        ), seed
        assert_keeps_the_rules(problem, plan)
