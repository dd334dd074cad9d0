"""Slows a problem and its plan by one factor, so that two cores can stand for many GPUs."""

from __future__ import annotations

from dataclasses import replace

from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    PooledModel,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)


def dilate_problem(problem: PoolingProblem, factor: float) -> PoolingProblem:
    """Returns a problem in which everything takes `factor` times as long."""
    return replace(
        problem,
        classes=tuple(_gpu_class(each, factor) for each in problem.classes),
        models=tuple(_model(each, factor) for each in problem.models),
    )


def dilate_plan(plan: PooledPlan, factor: float) -> PooledPlan:
    """Returns the plan of a problem as the plan of its dilated problem."""
    return replace(
        plan,
        objective=plan.objective / factor,
        bound=plan.bound / factor,
        models=tuple(
            replace(
                model,
                throughput_rps=model.throughput_rps / factor,
                pipelines=tuple(_pipeline(each, factor) for each in model.pipelines),
            )
            for model in plan.models
        ),
    )


def _gpu_class(gpu_class: GpuClass, factor: float) -> GpuClass:
    speed = gpu_class.server_bits_per_second
    return replace(gpu_class, server_bits_per_second=speed / factor)


def _model(model: PooledModel, factor: float) -> PooledModel:
    return replace(
        model,
        latency_us={device: times * factor for device, times in model.latency_us.items()},
        slo_us=model.slo_us * factor,
        margin_us=model.margin_us * factor,
        batch_build_us_per_row=model.batch_build_us_per_row * factor,
    )


def _pipeline(pipeline: PooledPipeline, factor: float) -> PooledPipeline:
    return replace(
        pipeline,
        throughput_rps=pipeline.throughput_rps / factor,
        latency_us=pipeline.latency_us * factor,
    )
