"""Errors for problems without a plan: the model, the constraint, and the nearest feasible SLO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns, enumerate_columns
from catenary_scheduler.planning.pooled.columns.device_tables import device_tables
from catenary_scheduler.planning.pooled.problem import Microseconds, PooledModel, PoolingProblem
from catenary_services.errors import InvalidInput, PlanInfeasible

_FOREVER_US = 1e15
_MOST_NAMES = 10


def check_problem(problem: PoolingProblem) -> None:
    """Raises InvalidInput for a problem that makes no sense on any cluster."""
    if not problem.classes or not problem.models:
        raise InvalidInput("problem", "needs at least one GPU class and one model")
    if problem.max_partitions < 1:
        raise InvalidInput("max_partitions", "must be 1 or more")
    for kind, names in (
        ("models", [model.name for model in problem.models]),
        ("classes", [gpu.name for gpu in problem.classes]),
    ):
        if len(set(names)) < len(names):
            raise InvalidInput(kind, "two have the same name")
    for gpu in problem.classes:
        if gpu.count < 0 or gpu.gpus_per_server < 1 or not gpu.server_bits_per_second > 0:
            raise InvalidInput(gpu.name, "needs a count, GPUs per server and a link rate")
        if not gpu.levels or min(gpu.levels) < 1:
            raise InvalidInput(gpu.name, "levels must be 1 or more")
    for model in problem.models:
        _check_model(model)


def _check_model(model: PooledModel) -> None:
    if not 0 < model.weight < math.inf:
        raise InvalidInput(model.name, "the weight must be positive")
    if not 0 < model.slo_us < math.inf or not 0 <= model.margin_us < model.slo_us:
        raise InvalidInput(model.name, "the SLO must be positive and exceed the margin")
    if len(model.cut_bytes) != model.blocks + 1:
        raise InvalidInput(model.name, "needs the bytes of every cut, both ends included")
    if model.block_weight_bytes and len(model.block_weight_bytes) != model.blocks:
        raise InvalidInput(model.name, "needs the weights of every block, or of none")
    for device, times in model.latency_us.items():
        if times.ndim != 2 or len(times) != model.blocks or not (times > 0).all():
            raise InvalidInput(model.name, f"the profile on {device} is not blocks x batches")


def check_pipelines(problem: PoolingProblem, model: PooledModel, columns: PipelineColumns) -> None:
    """Raises PlanInfeasible if a model has no pipeline, or none that the cluster has GPUs for."""
    if not len(columns):
        raise why_no_pipeline(problem, model)
    fits = np.ones(len(columns), dtype=np.bool_)
    for index, gpu in enumerate(problem.classes):
        fits &= columns.pools_of(index) <= gpu.count
    if not fits.any():
        raise _too_few_for(problem, model, "a pipeline", 0.0)


def why_no_pipeline(problem: PoolingProblem, model: PooledModel) -> PlanInfeasible:
    """Returns the error for a model that has no feasible pipeline."""
    present = [gpu for gpu in problem.classes if gpu.count > 0]
    if not any((gpu.name, level) in model.latency_us for gpu in present for level in gpu.levels):
        names = ", ".join(gpu.name for gpu in present) or "no GPUs at all"
        return PlanInfeasible(
            f"{model.name} has no profile for the cluster's GPUs ({names})",
            details={"model": model.name, "constraint": "profile"},
        )
    needed = least_latency_us(problem, model)
    if needed is None:
        return PlanInfeasible(
            f"{model.name}: its weights fit on no GPUs of the cluster in up to "
            f"{problem.max_partitions} partitions",
            details={"model": model.name, "constraint": "memory"},
        )
    # The value is rounded up to the printed precision, so that the SLO that is named is feasible.
    slo_ms = math.ceil((needed + model.margin_us) / 10.0) / 100.0
    return PlanInfeasible(
        f"{model.name}: no pipeline keeps the SLO of {model.slo_us / 1e3:.2f} ms with a margin of "
        f"{model.margin_us / 1e3:.2f} ms; the nearest feasible SLO is {slo_ms:.2f} ms",
        details={
            "model": model.name,
            "constraint": "slo",
            "nearest_feasible_slo_ms": f"{slo_ms:.2f}",
        },
    )


def least_latency_us(problem: PoolingProblem, model: PooledModel) -> Microseconds | None:
    """Returns the latency of the fastest pipeline under any SLO; None if no pipeline fits."""
    tables = device_tables(problem, model)
    patient = replace(model, slo_us=_FOREVER_US, margin_us=0.0)
    # A batch of one is the fastest; without an SLO larger batches would only cost time here.
    single = replace(tables, latency_us=tables.latency_us[:1], rate=tables.rate[:1])
    columns = enumerate_columns(patient, single, problem.max_partitions, most_spare=0)
    return float(np.min(columns.latency_us)) if len(columns) else None


def too_few_gpus(
    problem: PoolingProblem,
    rates: Sequence[float] | None,
    alone: Callable[[PooledModel], float | None],
) -> PlanInfeasible:
    """Returns the error for a cluster with too few GPUs.

    Args:
        problem: The problem that has no plan. Each of its models has a pipeline that fits alone.
        rates: Rate that each model must reach; None if any rate above zero suffices.
        alone: Returns the rate that a model would reach with the whole cluster to itself; None if
            there is no time left to find it.
    """
    named, largest = problem.models[0], 0.0
    for model, rate in zip(problem.models, rates or (), strict=bool(rates)):
        reached = alone(model)
        if reached is None:
            break
        if reached < rate * (1 - 1e-9):
            return _too_few_for(problem, model, f"{rate:.1f} requests/s", reached)
        if rate / reached > largest:
            named, largest = model, rate / reached
    # Each model fits alone, so the error names the one that needs the largest share of its best
    # rate.
    return PlanInfeasible(
        f"{named.name}: the cluster has too few GPUs ({_cluster(problem)}) for "
        f"{_together(problem)} together",
        details={"model": named.name, "constraint": "gpus"},
    )


def _too_few_for(
    problem: PoolingProblem, model: PooledModel, goal: str, reached: float
) -> PlanInfeasible:
    return PlanInfeasible(
        f"{model.name}: the cluster has too few GPUs ({_cluster(problem)}) for {goal}; "
        f"all of them together would serve {reached:.1f} requests/s",
        details={"model": model.name, "constraint": "gpus"},
    )


def _cluster(problem: PoolingProblem) -> str:
    return ", ".join(f"{gpu.count} x {gpu.name}" for gpu in problem.classes)


def _together(problem: PoolingProblem) -> str:
    names = [model.name for model in problem.models]
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more models"
