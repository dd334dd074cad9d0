"""Writes what the processes of a live scenario read: models without weights, profiles, the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from catenary_scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
    placement_document,
)
from catenary_scheduler.planning.pooled.problem import Device, PooledModel, PoolingProblem
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.plan import Agent, ModelPlan, Plan
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.models.model_repository import ModelRepository

INPUT = "input"
FEATURES = 16
"""Number of features of a request's only row, which is small: inputs are not part of what is
measured."""
_NS_PER_US = 1_000


def write_models(repository: ModelRepository, problem: PoolingProblem) -> None:
    """Writes manifest and block table of every model; there is no model file."""
    for model in problem.models:
        key = ModelKey(model.name, "1")
        largest = max(times.shape[1] for times in model.latency_us.values())
        repository.write_manifest(
            ModelManifest(
                key=key,
                platform="onnxruntime_onnx",
                file="model.onnx",
                slo_ns=round(model.slo_us * _NS_PER_US),
                max_batch=largest,
                float16_boundaries=True,
            )
        )
        repository.write_block_table(key, _table(model))


def _table(model: PooledModel) -> BlockTable:
    ends = {0: INPUT, model.blocks: "output"}
    boundaries = []
    for cut in range(model.blocks + 1):
        if cut in ends:
            spec = TensorSpec(ends[cut], "FP32", (ANY, FEATURES))
            boundaries.append(Boundary((spec,), 4 * FEATURES))
        else:
            # The profile's bytes are those of float16 tensors.
            width = -(-model.cut_bytes[cut] // 2)
            spec = TensorSpec(f"cut{cut}", "FP16", (ANY, width))
            boundaries.append(Boundary((spec,), 2 * width))
    slowest = max(model.latency_us.values(), key=lambda times: float(times[:, 0].sum()))
    compute_ns = tuple(round(float(us) * _NS_PER_US) for us in slowest[:, 0])
    return BlockTable("0" * 64, True, tuple(boundaries), compute_ns)


def write_profiles(folder: Path, problem: PoolingProblem) -> dict[Device, Path]:
    """Writes the block times of each kind of virtual GPU; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    devices = {device for model in problem.models for device in model.latency_us}
    for name, level in sorted(devices):
        document = {
            model.name: {
                str(block): [round(float(us) * _NS_PER_US) for us in times]
                for block, times in enumerate(model.latency_us[name, level])
            }
            for model in problem.models
            if (name, level) in model.latency_us
        }
        path = files[name, level] = folder / f"{name}-{level}.json"
        path.write_text(json.dumps(document))
    return files


def plan_document(plan: Plan) -> dict[str, object]:
    """Returns the plan as a placement, without times: those are the agents' own."""
    return placement_document(Placement(tuple(_placement(model) for model in plan.models)))


def _placement(model: ModelPlan) -> ModelPlacement:
    pipelines = tuple(
        PipelinePlacement(
            pipeline.batch_size,
            tuple(
                StagePlacement(
                    stage.partition.first_block, stage.partition.last_block, stage.agents
                )
                for stage in pipeline.stages
            ),
        )
        for pipeline in model.pipelines
    )
    return ModelPlacement(model.model, model.slo_ns, model.float16_boundaries, pipelines)


def agent_settings(
    agents: Sequence[Agent], profiles: Mapping[Device, Path]
) -> tuple[dict[str, Any], ...]:
    """Returns the settings of each agent process, see `catenary_agent.settings.AgentSettings`."""
    return tuple(
        {
            "agent_id": agent.agent_id,
            "device": f"emulated:{agent.device_class}",
            "device_class": agent.device_class,
            "server_id": agent.server,
            "link_bytes_per_second": agent.link_bytes_per_second,
            "emulated_link": True,
            "emulated_profile": profiles[agent.device_class, agent.virtual_level],
        }
        for agent in agents
    )
