"""Device tables: latency and rate of every partition on each device, by batch size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.problem import Device, GpuClass, PooledModel, PoolingProblem
from catenary_scheduler.planning.pooled.timing import link_rate_rps, transfer_us

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """Latencies and rates of one model on the devices that a cluster has."""

    devices: tuple[Device, ...]
    class_of: Ints
    """Index of each device's class in the problem."""
    level_of: Ints
    latency_us: Floats
    """Microseconds of compute of [first, last), shape (batches, devices, blocks + 1, blocks + 1);
    inf where it cannot run."""
    rate: Floats
    """Requests per second of one virtual GPU, in the same shape."""
    transfer_us: Floats
    """Microseconds of one request across a cut, shape (classes, classes, blocks + 1)."""


def device_tables(problem: PoolingProblem, model: PooledModel) -> DeviceTables:
    """Returns the tables of a model on the classes of the problem that have GPUs."""
    devices = [
        (index, gpu, level)
        for index, gpu in enumerate(problem.classes)
        for level in sorted(gpu.levels)
        if gpu.count > 0 and (gpu.name, level) in model.latency_us
    ]
    batches = max(
        (model.latency_us[gpu.name, level].shape[1] for _, gpu, level in devices), default=0
    )
    size = model.blocks + 1
    latency = np.full((batches, len(devices), size, size), np.inf)
    rate = np.zeros_like(latency)
    for position, (_, gpu, level) in enumerate(devices):
        spans, rates = _one_device(model, gpu, level)
        latency[: len(spans), position] = spans
        rate[: len(spans), position] = rates
    return DeviceTables(
        devices=tuple((gpu.name, level) for _, gpu, level in devices),
        class_of=np.array([index for index, _, _ in devices], dtype=np.int64),
        level_of=np.array([level for _, _, level in devices], dtype=np.int64),
        latency_us=latency,
        rate=rate,
        transfer_us=np.array(
            [
                [[transfer_us(cut, a, b) for cut in model.cut_bytes] for b in problem.classes]
                for a in problem.classes
            ]
        ),
    )


def _one_device(model: PooledModel, gpu: GpuClass, level: int) -> tuple[Floats, Floats]:
    """Returns latency and rate, each of shape (batches, first, last)."""
    times = model.latency_us[gpu.name, level]
    ends = np.concatenate([np.zeros((1, times.shape[1])), np.cumsum(times, axis=0)])
    spans = (ends[None, :, :] - ends[:, None, :]).transpose(2, 0, 1)
    allowed = (spans > 0) & _fits_memory(model, gpu, level)
    latency = np.where(allowed, spans, np.inf)
    link = np.array([link_rate_rps(cut, gpu, level) for cut in model.cut_bytes])
    rows = np.arange(1, len(spans) + 1)[:, None, None] * 1e6
    # A partition that cannot run has the rate rows / inf = 0.
    return latency, np.minimum(rows / latency, np.minimum(link[:, None], link[None, :]))


def _fits_memory(model: PooledModel, gpu: GpuClass, level: int) -> npt.NDArray[np.bool_]:
    """Returns a mask by [first, last]: True if the weights fit in a virtual GPU's memory."""
    size = model.blocks + 1
    if gpu.memory_bytes is None or not model.block_weight_bytes:
        return np.ones((size, size), dtype=np.bool_)
    ends = np.concatenate([[0], np.cumsum(model.block_weight_bytes)])
    fits: npt.NDArray[np.bool_] = (ends[None, :] - ends[:, None]) * level <= gpu.memory_bytes
    return fits
