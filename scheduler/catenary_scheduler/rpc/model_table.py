"""The table of the cluster's models that gateways get."""

from __future__ import annotations

from collections.abc import Callable

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.agents.deployments import Deployment, Deployments
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.plan import ModelPlan, Plan
from catenary_services.domain.tensors import ANY, BYTES, TensorSpec

_ROWS_PER_BATCH = 64
"""A request may have the rows of this many largest batches; it is split, and its answers merged."""


def model_table(
    deployments: Deployments, reason: Callable[[ModelKey], str], plan: Plan | None
) -> scheduler_pb2.ModelTable:
    """Returns the table of all models, ready or not.

    Args:
        deployments: The deployed models, and those that cannot be deployed.
        reason: Returns why a model is not ready; empty if it is.
        plan: The plan in force; None without one.
    """
    table = scheduler_pb2.ModelTable(plan_id=plan.plan_id if plan is not None else "")
    workers = {model.model: _workers(model) for model in plan.models} if plan is not None else {}
    for key, deployment in deployments.ready.items():
        served = _served(key, deployment, reason(key))
        served.content_digest = deployment.content
        served.workers = workers.get(key, 0) if served.ready else 0
        table.models.append(served)
    for reference, problem in deployments.problems.items():
        name, _, version = reference.partition(":")
        table.models.add(name=name, version=version, ready=False, not_ready_reason=problem)
    return table


def _workers(model: ModelPlan) -> int:
    """Returns the number of a model's chains, or else of the agents of its pipelines."""
    stages = (stage for pipeline in model.own_pipelines for stage in pipeline.stages)
    return len(model.chains) or len({agent for stage in stages for agent in stage.agents})


def _served(key: ModelKey, deployment: Deployment, reason: str) -> scheduler_pb2.ServedModel:
    table = deployment.table
    if deployment.decoder is not None:
        return scheduler_pb2.ServedModel(
            name=key.name,
            version=key.version,
            platform=deployment.manifest.platform,
            ready=not reason,
            not_ready_reason=reason,
            default_slo_ns=deployment.slo_ns,
            max_rows=1,
            generates=True,
            session_tokens=deployment.manifest.session_tokens,
            adapters=[name for name, _ in deployment.manifest.adapters],
        )
    first, last = table.boundaries[0], table.boundaries[-1]
    return scheduler_pb2.ServedModel(
        name=key.name,
        version=key.version,
        platform=deployment.manifest.platform,
        inputs=[_spec(tensor) for tensor in first.tensors],
        outputs=[_spec(tensor) for tensor in last.tensors],
        ready=not reason,
        not_ready_reason=reason,
        default_slo_ns=deployment.slo_ns,
        batched=table.batched,
        max_rows=deployment.max_batch * _ROWS_PER_BATCH if table.batched else 1,
        max_row_bytes=_row_limit(first.tensors, first.row_bytes),
        text_tokens=_text_tokens(deployment),
    )


def _text_tokens(deployment: Deployment) -> int:
    """Returns the most tokens of a text: not more than the model was prepared for."""
    units, wanted = deployment.table.units, deployment.manifest.text_tokens
    return wanted if units is None else min(wanted, units.text_tokens)


def _row_limit(tensors: tuple[TensorSpec, ...], row_bytes: int) -> int:
    """Returns the bytes of one row; 0 if a size other than that of the batch is free."""
    free = any(ANY in tensor.shape[1:] or tensor.datatype == BYTES for tensor in tensors)
    return 0 if free else row_bytes


def _spec(tensor: TensorSpec) -> common_pb2.TensorSpec:
    return common_pb2.TensorSpec(
        name=tensor.name, datatype=tensor.datatype, shape=list(tensor.shape)
    )
