"""The plans of PPipe's authors, as `reference_plans.json` records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from catenary_scheduler.planning.pooled.dataset import PlanningDataset
from catenary_scheduler.planning.pooled.dataset_files import reading
from catenary_scheduler.planning.pooled.problem import (
    Microseconds,
    PooledModelPlan,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)
from catenary_scheduler.planning.pooled.timing import batch_building_us, compute_us, transfer_us
from catenary_services.errors import InvalidInput

OPTIMAL_GAP = 1e-4
"""Gurobi's default gap; a plan within it counted as optimal."""


def reference_plan(dataset: PlanningDataset, instance_id: str, scheduler: str = "v4") -> PooledPlan:
    """Returns the plan that the reference's authors computed.

    Args:
        dataset: A data set with `reference_plans.json`.
        instance_id: Id of the instance, as in `instances.json`.
        scheduler: Planner of the plan: "v4", "bl" or "dart-r".

    Raises:
        InvalidInput: The data set has no such plan.
    """
    document = dataset.plans.get((instance_id, scheduler))
    if document is None:
        raise InvalidInput(
            "instance", f"the data set holds no plan of {scheduler!r} for {instance_id}"
        )
    reached = dataset.instance(instance_id).reference.get(scheduler, {})
    problem = dataset.problem(instance_id)
    with reading("reference_plans.json"):
        return recorded_plan(document, reached, problem)


def recorded_plan(
    document: Mapping[str, Any], reached: Mapping[str, Any], problem: PoolingProblem
) -> PooledPlan:
    """Returns the recorded plan; rates are the record's, latencies are worked out here.

    Args:
        document: An entry of `reference_plans.json`. Its rates are lower bounds: the solver
            leaves models that do not bind below what their pools could do.
        reached: What `instances.json` says about it: objective, Gurobi's gap and seconds.
        problem: The instance, for latencies and weights.
    """
    models = tuple(_model_plan(dnn["dnn"], dnn["pipelines"], problem) for dnn in document["dnns"])
    weights = {model.name: model.weight for model in problem.models}
    objective = min(plan.throughput_rps / weights[plan.name] for plan in models)
    gap = float(reached.get("gurobi_mipgap") or 0.0)
    return PooledPlan(
        objective=objective,
        bound=objective * (1.0 + gap),
        optimal=gap <= OPTIMAL_GAP,
        solver="reference",
        seconds=float(reached.get("gurobi_seconds") or 0.0),
        models=models,
    )


def _model_plan(
    name: str, pipelines: Sequence[Mapping[str, Any]], problem: PoolingProblem
) -> PooledModelPlan:
    built = tuple(_pipeline(name, pipeline, problem) for pipeline in pipelines)
    return PooledModelPlan(
        name=name,
        throughput_rps=sum(pipeline.throughput_rps for pipeline in built),
        pipelines=built,
    )


def _pipeline(name: str, pipeline: Mapping[str, Any], problem: PoolingProblem) -> PooledPipeline:
    partitions = tuple(
        PooledPartition(
            gpu=part["gpu"],
            level=int(part["vgpus_per_gpu"]),
            first_block=int(part["blocks"][0]),
            last_block=int(part["blocks"][1]),
            vgpus=int(part["vgpus"]),
            # The record's GPUs carry the solver's rounding errors (74.999995).
            gpus=int(part["vgpus"]) / int(part["vgpus_per_gpu"]),
        )
        for part in pipeline["partitions"]
    )
    batch = int(pipeline["batch"])
    return PooledPipeline(
        batch=batch,
        throughput_rps=float(pipeline["xput_rps"]),
        latency_us=pipeline_latency_us(problem, name, batch, partitions),
        partitions=partitions,
    )


def pipeline_latency_us(
    problem: PoolingProblem, name: str, batch: int, partitions: Sequence[PooledPartition]
) -> Microseconds:
    """Returns the microseconds of one batch through the partitions, without the margin."""
    model = next(model for model in problem.models if model.name == name)
    classes = {gpu.name: gpu for gpu in problem.classes}
    total = batch_building_us(model, batch)
    total += sum(compute_us(model, partition, batch) for partition in partitions)
    for before, after in pairwise(partitions):
        size = model.cut_bytes[after.first_block]
        total += batch * transfer_us(size, classes[before.gpu], classes[after.gpu])
    return total
