"""Problem and plan of the pooled planner: GPU classes, models by block, and the resulting pools.

Units are those of the profiles: times in microseconds, sizes in bytes, rates in requests per
second. Plans leave the planner in integer nanoseconds
(`catenary_scheduler.planning.pooled.layout.layout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Microseconds = float
BlockTimes = npt.NDArray[np.float64]
"""Latency in us of each block, shape (blocks, batch sizes); column 0 is batch 1."""
Device = tuple[str, int]
"""Pair of a GPU class and a level v, for one of v virtual GPUs of such a GPU."""


@dataclass(frozen=True, slots=True)
class GpuClass:
    """The GPUs of one kind in a cluster."""

    name: str
    count: int
    """Number of physical GPUs."""
    levels: tuple[int, ...] = (1,)
    """Numbers of virtual GPUs into which a GPU may be divided, ascending."""
    gpus_per_server: int = 1
    """Number of physical GPUs that share one uplink and one downlink."""
    server_bits_per_second: float = 1e10
    """Effective rate of a server's link in each direction."""
    memory_bytes: int | None = None
    """Memory of a physical GPU; None leaves memory out of the plan."""
    cost_per_hour: float = 1.0
    """Cost of a physical GPU in any currency, which the objective "least cost" adds up."""


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model as the planner sees it: its latencies, sizes and deadline."""

    name: str
    blocks: int
    latency_us: Mapping[Device, BlockTimes]
    """Latencies by class and level, on one virtual GPU with all others of its GPU busy."""
    cut_bytes: tuple[int, ...]
    """Bytes of one request that cross in front of block c, length blocks + 1; 0 at both ends."""
    slo_us: Microseconds
    margin_us: Microseconds = 0.0
    """Part of the SLO that is kept free for queueing, noise and contention (the paper: 0.4 of the
    SLO)."""
    weight: float = 1.0
    """Relative share of the load: the plan maximises the least throughput / weight."""
    batch_build_us_per_row: Microseconds = 0.0
    """Time until one more row has arrived (1.3e6 / expected rate). It counts batch - 1 times."""
    block_weight_bytes: tuple[int, ...] = ()
    """Bytes of the weights of each block; empty leaves memory out of the plan."""


@dataclass(frozen=True, slots=True)
class PoolingProblem:
    """A planning task. `max_partitions` bounds the length of a pipeline."""

    classes: tuple[GpuClass, ...]
    models: tuple[PooledModel, ...]
    max_partitions: int = 3


@dataclass(frozen=True, slots=True)
class PooledPartition:
    """Blocks `[first_block, last_block)` on `vgpus` virtual GPUs, each 1/level of a `gpu`."""

    gpu: str
    level: int
    first_block: int
    last_block: int
    vgpus: int
    gpus: float
    """Number of physical GPUs; fractional only where two pipelines of a model share one at a
    position."""


@dataclass(frozen=True, slots=True)
class PooledPipeline:
    """Partitions in order, and the batch size that all of them use."""

    batch: int
    throughput_rps: float
    """Requests per second of its smallest pool."""
    latency_us: Microseconds
    """Compute, transfers and batch building of one batch, without the margin."""
    partitions: tuple[PooledPartition, ...]


@dataclass(frozen=True, slots=True)
class SharedRoute:
    """A way of a model through the pools of a pipeline of another model."""

    host: int
    """Index of the other model in the plan."""
    host_pipeline: int
    """Index of the pipeline of that model."""
    pipeline: PooledPipeline
    """Blocks of the model itself on the pools of that pipeline. Its throughput is what it would
    reach if it had them for itself."""


@dataclass(frozen=True, slots=True)
class PooledModelPlan:
    """Pipelines that serve one model. `throughput_rps` is the sum over them."""

    name: str
    throughput_rps: float
    pipelines: tuple[PooledPipeline, ...]
    shared: tuple[SharedRoute, ...] = ()
    """Ways through pools of others, which promise nothing and count in no objective."""


@dataclass(frozen=True, slots=True)
class PooledPlan:
    """A solved planning task, with what it promises."""

    objective: float
    """Least throughput / weight over the models; for a given load, the cost or the number of
    GPUs."""
    bound: float
    """Bound on the objective that no plan within the rules can pass."""
    optimal: bool
    """True if the plan is proven optimal: objective and bound differ by rounding only."""
    solver: str
    seconds: float
    models: tuple[PooledModelPlan, ...]
    utilisation: Mapping[str, float] = field(default_factory=dict)
    """Share of the GPU time in use at the promised load, by class."""
    binding: tuple[str, ...] = ()
    """Sentences on the models and classes that keep the objective from being better."""
