"""The choice of an executor by device."""

from __future__ import annotations

from pathlib import Path

from catenary_agent.executors.base import Executor
from catenary_agent.executors.device import Device
from catenary_agent.executors.emulated import EmulatedPart
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_services.domain.ids import PartitionKey
from catenary_services.models.model_repository import ModelRepository


def load_executor(
    repository: ModelRepository,
    key: PartitionKey,
    *,
    device: Device,
    float16_boundaries: bool,
    threads: int = 1,
    engine_cache: Path | None = None,
) -> Executor:
    """Returns an executor of blocks `[first, last)`, ready to run.

    Args:
        repository: The repository with the model.
        key: The partition.
        device: The device to run on.
        float16_boundaries: Whether inner tensors travel as float16.
        threads: Number of compute threads on a CPU.
        engine_cache: See `OnnxOptions.engine_cache`.

    Raises:
        ModelNotFound: The model or its block table is absent.
        InvalidInput: The range is not one of its blocks, or the table is of another model file.
        NotSupported: The device cannot run this kind of model.
    """
    if device.kind == "emulated":
        table = repository.block_table(key.model)
        ends = PartitionSignature.of(repository, key, float16_boundaries)
        return EmulatedPart(ends, table, device, repository.profile(key.model))
    if repository.manifest(key.model).platform == "pytorch_exported":
        from catenary_agent.executors.torch_part import load_torch_part

        return load_torch_part(repository, key, float16_boundaries, device, threads)
    from catenary_agent.executors.onnx_part import OnnxOptions, load_onnx_part

    options = OnnxOptions(device, threads, engine_cache=engine_cache)
    return load_onnx_part(repository, key, float16_boundaries, options)
