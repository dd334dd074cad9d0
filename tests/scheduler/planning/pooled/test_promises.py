"""What a plan promises, what is impossible, and how both are told."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_lab.pools.artifact.solving import solve_by_reference_rules
from catenary_scheduler.planning.pooled import (
    LeastCost,
    LeastGpus,
    MaxThroughput,
    Objective,
    explain_plan,
    plan_pools,
)
from catenary_scheduler.planning.pooled.assembly import gpus_in_use
from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    PooledModel,
    PooledPlan,
    PoolingProblem,
)
from catenary_services.errors import InvalidInput, PlanInfeasible
from scheduling_cases.pooled_problems import assert_keeps_the_rules, random_problem

PLANS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LEVELS = st.sampled_from([(1,), (1, 2), (1, 2, 3, 4)])


@st.composite
def problems(draw: st.DrawFn) -> PoolingProblem:
    return random_problem(
        draw(st.integers(0, 10**9)),
        classes=draw(st.integers(1, 3)),
        models=draw(st.integers(1, 3)),
        most_gpus=draw(st.integers(1, 9)),
        levels=draw(LEVELS),
        blocks=draw(st.integers(1, 4)),
        max_partitions=draw(st.integers(1, 3)),
    )


def _plan(problem: PoolingProblem, objective: Objective | None = None) -> PooledPlan | None:
    try:
        return plan_pools(problem, objective=objective)
    except PlanInfeasible:
        return None


@PLANS
@given(problems())
def test_any_plan_keeps_gpus_slo_memory_and_order_of_blocks(problem: PoolingProblem) -> None:
    plan = _plan(problem)
    if plan is not None:
        assert_keeps_the_rules(problem, plan)
        least = min(
            served.throughput_rps / model.weight
            for served, model in zip(plan.models, problem.models, strict=True)
        )
        assert least == pytest.approx(plan.objective, rel=1e-8)
        assert all(0 <= share <= 1 + 1e-9 for share in plan.utilisation.values())


@PLANS
@given(problems(), st.data())
def test_more_gpus_a_longer_slo_or_more_partitions_never_plan_less(
    problem: PoolingProblem, data: st.DataObject
) -> None:
    plan = _plan(problem)
    first, *others = problem.classes
    richer = data.draw(
        st.sampled_from(
            [
                replace(problem, classes=(replace(first, count=first.count + 1), *others)),
                replace(
                    problem,
                    models=tuple(
                        replace(model, slo_us=model.slo_us * 1.3) for model in problem.models
                    ),
                ),
                replace(problem, max_partitions=problem.max_partitions + 1),
            ]
        )
    )
    better = _plan(richer)
    if plan is not None:
        assert better is not None
        assert better.objective >= plan.objective * (1 - 1e-8)


@PLANS
@given(problems(), st.floats(0.2, 1.0), st.sampled_from([LeastCost, LeastGpus]))
def test_a_given_load_is_carried_and_no_gpu_is_idle_for_nothing(
    problem: PoolingProblem, share: float, goal: type[LeastCost] | type[LeastGpus]
) -> None:
    most = _plan(problem)
    if most is None:
        return
    load = {
        model.name: share * most.objective * model.weight * (1 - 1e-6) for model in problem.models
    }
    plan = plan_pools(problem, objective=goal(load))
    assert_keeps_the_rules(problem, plan)
    for served in plan.models:
        assert served.throughput_rps >= load[served.name] * (1 - 1e-8)
    used = gpus_in_use(plan)
    price = sum(
        used.get(gpu.name, 0) * (gpu.cost_per_hour if goal is LeastCost else 1.0)
        for gpu in problem.classes
    )
    assert plan.objective == pytest.approx(price)
    # With one GPU less of all in use, the same load is not carried.
    counts = {gpu.name: used.get(gpu.name, 0) for gpu in problem.classes}
    for fewer in [{**counts, name: count - 1} for name, count in counts.items() if count]:
        classes = tuple(replace(gpu, count=fewer[gpu.name]) for gpu in problem.classes)
        assert _plan(replace(problem, classes=classes), goal(load)) is None


def test_equal_rates_take_the_lower_latency() -> None:
    # A batch of two takes twice as long and serves no more.
    times = {("a", 1): np.array([[4000.0, 8000.0, 15_000.0]])}
    model = PooledModel("m", 1, times, (0, 0), slo_us=10_000.0)
    plan = plan_pools(PoolingProblem((GpuClass("a", 2),), (model,)))
    assert [pipeline.batch for pipeline in plan.models[0].pipelines] == [1]


def test_a_given_load_takes_the_quickest_pipeline_that_carries_it() -> None:
    times = {("a", 1): np.array([[4000.0, 6000.0]])}
    model = PooledModel("m", 1, times, (0, 0), slo_us=10_000.0)
    problem = PoolingProblem((GpuClass("a", 2),), (model,))

    def batch(load_rps: float) -> int:
        plan = plan_pools(problem, objective=LeastGpus({"m": load_rps}))
        assert plan.objective == 1.0
        return plan.models[0].pipelines[0].batch

    assert (batch(249.0), batch(251.0)) == (1, 2)


def test_left_over_gpus_go_to_the_most_loaded_pool() -> None:
    # Block 1 takes twice as long as block 0 and only class b runs it; two models share b.
    times = {("a", 1): np.array([[1000.0], [9e6]]), ("b", 1): np.array([[9e6], [2000.0]])}
    model = PooledModel("m", 2, times, (0, 1000, 0), slo_us=10_000.0)
    classes = (GpuClass("a", 5), GpuClass("b", 4))
    plan = plan_pools(PoolingProblem(classes, (model,)))
    (pipeline,) = plan.models[0].pipelines
    assert pipeline.throughput_rps == pytest.approx(2000.0)
    # Two of class a would do; the three idle ones shorten its queue.
    assert [part.gpus for part in pipeline.partitions] == [5, 4]
    assert plan.utilisation["a"] == pytest.approx(0.4)
    assert plan.utilisation["b"] == pytest.approx(1.0)


def _two_classes() -> PoolingProblem:
    return next(
        problem
        for problem in (random_problem(seed, models=2, most_gpus=4) for seed in itertools.count())
        if _plan(problem) is not None
    )


def test_the_plan_says_what_binds_it_and_the_explanation_repeats_that() -> None:
    problem = _two_classes()
    plan = plan_pools(problem)
    assert plan.binding
    tight = [
        served.name
        for served, model in zip(plan.models, problem.models, strict=True)
        if served.throughput_rps <= plan.objective * model.weight * (1 + 1e-6)
    ]
    assert tight
    assert all(any(name in fact for fact in plan.binding) for name in tight)
    text = "\n".join(explain_plan(problem, plan))
    for served in plan.models:
        assert f"{served.name} can serve {served.throughput_rps:.1f} requests/s" in text
        for pipeline in served.pipelines:
            assert f"in batches of {pipeline.batch}" in text
    for fact in plan.binding:
        assert fact in text
    assert "proven by dp" in text


def test_an_unproven_plan_is_explained_with_its_gap() -> None:
    problem = _two_classes()
    plan = replace(plan_pools(problem), optimal=False)
    open_gap = replace(plan, bound=plan.objective * 1.031)
    assert "gain 3.1% at most" in "\n".join(explain_plan(problem, open_gap))


def _one_model(**changes: object) -> PoolingProblem:
    model = PooledModel(
        "m",
        2,
        {("a", 1): np.array([[3000.0, 5000.0], [4000.0, 7000.0]])},
        (0, 1000, 0),
        slo_us=20_000.0,
        margin_us=2_000.0,
        block_weight_bytes=(60, 70),
    )
    return PoolingProblem((GpuClass("a", 3, memory_bytes=100),), (replace(model, **changes),))  # type: ignore[arg-type]


def _why(problem: PoolingProblem, objective: Objective | None = None) -> PlanInfeasible:
    with pytest.raises(PlanInfeasible) as caught:
        plan_pools(problem, objective=objective)
    return caught.value


def test_an_slo_out_of_reach_is_named_with_the_nearest_one_that_is_not() -> None:
    problem = _one_model(slo_us=8_000.0)
    error = _why(problem)
    assert error.details["model"] == "m"
    assert error.details["constraint"] == "slo"
    nearest_us = float(error.details["nearest_feasible_slo_ms"]) * 1e3
    # Its weights fit no GPU in one piece: the nearest pipeline has a transfer as well.
    assert nearest_us == pytest.approx(3000 + 4000 + 2000, abs=15)
    assert plan_pools(_one_model(slo_us=nearest_us)).objective > 0
    assert _why(_one_model(slo_us=nearest_us - 20.0)).details["constraint"] == "slo"


def test_weights_that_fit_nowhere_are_named() -> None:
    error = _why(_one_model(block_weight_bytes=(60, 101)))
    assert error.details == {"model": "m", "constraint": "memory"}


def test_a_missing_profile_is_named() -> None:
    problem = _one_model()
    error = _why(replace(problem, classes=(GpuClass("b", 3),)))
    assert error.details == {"model": "m", "constraint": "profile"}
    assert "b" in error.message


def test_a_class_without_gpus_needs_no_profile_and_serves_nothing() -> None:
    error = _why(replace(_one_model(), classes=(GpuClass("a", 0),)))
    assert error.details["constraint"] == "profile"


def test_too_few_gpus_are_named() -> None:
    one = replace(_one_model(), classes=(GpuClass("a", 1, memory_bytes=100),))
    assert _why(one).details == {"model": "m", "constraint": "gpus"}


def test_a_load_beyond_the_cluster_is_named_with_what_it_would_carry() -> None:
    problem = _one_model()
    most = plan_pools(problem).objective
    error = _why(problem, LeastCost({"m": most * 2}))
    assert error.details == {"model": "m", "constraint": "gpus"}
    assert f"would serve {most:.1f} requests/s" in error.message


def test_loads_that_fit_alone_but_not_together_are_named() -> None:
    one = _one_model()
    two = replace(one, models=(one.models[0], replace(one.models[0], name="n")))
    most = plan_pools(one).objective
    error = _why(two, LeastGpus({"m": most, "n": most / 2}))
    assert error.details == {"model": "m", "constraint": "gpus"}
    assert "together" in error.message


@pytest.mark.parametrize(
    "load", [{}, {"m": 0.0}, {"m": float("nan")}, {"m": float("inf")}, {"m": 1.0, "other": 1.0}]
)
def test_a_load_that_makes_no_sense_is_refused(load: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        plan_pools(_one_model(), objective=LeastCost(load))


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0.0},
        {"slo_us": -1.0},
        {"margin_us": 20_000.0},
        {"cut_bytes": (0, 0)},
        {"block_weight_bytes": (1,)},
        {"latency_us": {("a", 1): np.array([[1.0]])}},
        {"latency_us": {("a", 1): np.array([[1.0], [0.0]])}},
    ],
)
def test_a_model_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=r"^m: "):
        plan_pools(_one_model(**changes))


def test_unknown_solvers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="solver"):
        plan_pools(_one_model(), solver="gurobi")  # type: ignore[arg-type]


def test_the_exact_search_of_slots_says_what_it_cannot_do() -> None:
    problem = replace(random_problem(0, classes=3, most_gpus=2), max_partitions=3)
    with pytest.raises(InvalidInput, match="use highs"):
        plan_pools(problem, solve=solve_by_reference_rules, solver="dp", objective=MaxThroughput())


def test_seconds_come_from_the_clock_alone() -> None:
    ticks = itertools.count(start=5.0, step=0.25)
    assert plan_pools(_one_model(), clock=lambda: next(ticks)).seconds == 0.5
    assert plan_pools(_one_model()).seconds == 0.0
