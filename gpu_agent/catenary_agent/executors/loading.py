"""The choice of an executor by device, and the measurement of its times."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from catenary_agent.executors.base import Executor, PartitionSignature
from catenary_agent.executors.device import Device
from catenary_agent.executors.emulated import EmulatedPart
from catenary_services.domain.ids import PartitionKey
from catenary_services.models.model_repository import ModelRepository

_EXACT_UP_TO = 4
"""Batch sizes up to this one are all measured, larger ones at every doubling; the rest is
interpolated."""
_RUNS = 4


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
        compute_ns = repository.block_table(key.model).compute_ns
        ends = PartitionSignature.of(repository, key, float16_boundaries)
        return EmulatedPart(ends, compute_ns, device, repository.profile(key.model))
    if repository.manifest(key.model).platform == "pytorch_exported":
        from catenary_agent.executors.torch_part import load_torch_part

        return load_torch_part(repository, key, float16_boundaries, device, threads)
    from catenary_agent.executors.onnx_part import OnnxOptions, load_onnx_part

    options = OnnxOptions(device, threads, engine_cache=engine_cache)
    return load_onnx_part(repository, key, float16_boundaries, options)


def measure(executor: Executor, max_batch: int) -> tuple[int, ...]:
    """Returns the compute time in nanoseconds at batch 1, 2, .. `max_batch`.

    Each is the shortest of a few runs, raised to that of smaller batches: a larger batch that looks
    faster is noise, and the dispatcher relies on the order. A model that is not batched has one
    entry. Emulated executors return their times without running.
    """
    largest = max_batch if executor.batched else 1
    if isinstance(executor, EmulatedPart):
        return tuple(executor.compute_ns(rows) for rows in range(1, largest + 1))
    sizes = [rows for rows in range(1, largest + 1) if rows <= _EXACT_UP_TO]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    times = np.maximum.accumulate([_time(executor, rows) for rows in sizes])
    return tuple(round(t) for t in np.interp(range(1, largest + 1), sizes, times))


def _time(executor: Executor, rows: int) -> int:
    arrays = executor.ends.example_arrays(rows)
    outputs = executor.run(arrays)  # warms caches, and settles shapes and memory
    if executor.output_shapes([array.shape for array in arrays]) is None:
        outputs = []
    taken = []
    for _ in range(_RUNS):
        started = time.perf_counter_ns()
        executor.run(arrays, outputs or None)
        taken.append(time.perf_counter_ns() - started)
    return min(taken)
