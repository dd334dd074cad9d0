"""Small planning tasks and plans for them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    PooledModel,
    PooledModelPlan,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)

BLOCKS = 4


def gpu_class(name: str, count: int, per_server: int = 1, gbps: float = 8.0) -> GpuClass:
    """Returns a class of GPUs with links of `gbps` (8 Gbit/s: 1 MB takes 1 ms)."""
    return GpuClass(name, count, (1, 2, 3, 4), per_server, gbps * 1e9)


def model(
    name: str,
    *,
    slo_ms: float,
    block_ms: Mapping[str, float],
    cut_bytes: int = 1_000_000,
    batches: int = 4,
) -> PooledModel:
    """Returns a model of four equal blocks; a batch of b takes (1 + b) / 2 of its time alone.

    One of v virtual GPUs takes v times as long as the whole GPU.
    """
    sizes = np.array([(1 + batch) / 2 for batch in range(1, batches + 1)])
    latency = {
        (gpu, level): np.tile(sizes * ms * level * 1000, (BLOCKS, 1))
        for gpu, ms in block_ms.items()
        for level in (1, 2, 3, 4)
    }
    cuts = (0, *(cut_bytes,) * (BLOCKS - 1), 0)
    return PooledModel(name, BLOCKS, latency, cuts, slo_ms * 1000)


def partition(gpu: str, level: int, blocks: tuple[int, int], vgpus: int) -> PooledPartition:
    """Returns a partition whose GPUs are all its own."""
    return PooledPartition(gpu, level, *blocks, vgpus, vgpus / level)


def pipeline(
    batch: int, rps: float, *partitions: PooledPartition, latency_ms: float = 0.0
) -> PooledPipeline:
    """Returns a pipeline."""
    return PooledPipeline(batch, rps, latency_ms * 1000, partitions)


def plan(models: Mapping[str, Sequence[PooledPipeline]]) -> PooledPlan:
    """Returns a plan of these pipelines."""
    served = tuple(
        PooledModelPlan(name, sum(each.throughput_rps for each in pipelines), tuple(pipelines))
        for name, pipelines in models.items()
    )
    return PooledPlan(1.0, 1.0, True, "by hand", 0.0, served)


def two_stages(*, slo_ms: float = 40.0, batch: int = 1) -> tuple[PoolingProblem, PooledPlan]:
    """Returns a task and a plan: 4 slow GPUs (2 ms a block), then 2 fast ones (1 ms), 1 MB between.

    At batch 1 a request takes 4 + 1 + 2 = 7 ms, and 1000 a second saturate both pools.
    """
    problem = PoolingProblem(
        (gpu_class("fast", 2), gpu_class("slow", 4)),
        (model("m", slo_ms=slo_ms, block_ms={"fast": 1.0, "slow": 2.0}),),
    )
    stages = (partition("slow", 1, (0, 2), 4), partition("fast", 1, (2, 4), 2))
    return problem, plan({"m": [pipeline(batch, 1000.0, *stages, latency_ms=7.0)]})
