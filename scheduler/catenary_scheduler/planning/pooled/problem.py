"""What the pooled planner is asked: a cluster by GPU class, models by block, and what is wanted.

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
"""Shape (blocks, batch sizes): latency in us of each block; column 0 is batch 1."""
Device = tuple[str, int]
"""A GPU class and a level v: one of v virtual GPUs of such a GPU."""


@dataclass(frozen=True, slots=True)
class GpuClass:
    """The GPUs of one kind."""

    name: str
    count: int
    """Physical GPUs."""
    levels: tuple[int, ...] = (1,)
    """Into how many virtual GPUs one may be divided, ascending."""
    gpus_per_server: int = 1
    """Physical GPUs that share one uplink and one downlink."""
    server_bits_per_second: float = 1e10
    """Effective rate of a server's link, each way."""
    memory_bytes: int | None = None
    """Of a physical GPU; None leaves memory out of the plan."""
    cost_per_hour: float = 1.0
    """Of a physical GPU, in any currency; the objective "least cost" adds it up."""


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model as the planner needs it."""

    name: str
    blocks: int
    latency_us: Mapping[Device, BlockTimes]
    """Per class and level, on one virtual GPU with all others of its GPU busy."""
    cut_bytes: tuple[int, ...]
    """Length blocks + 1: bytes of one request that cross in front of block c; 0 at both ends."""
    slo_us: Microseconds
    margin_us: Microseconds = 0.0
    """Kept free of the SLO for queueing, noise and contention (the paper: 0.4 of the SLO)."""
    weight: float = 1.0
    """Share of the load: the plan maximises the least throughput / weight."""
    batch_build_us_per_row: Microseconds = 0.0
    """Time until one more row has arrived (1.3e6 / expected rate); counts batch - 1 times."""
    block_weight_bytes: tuple[int, ...] = ()
    """Weights of each block; empty leaves memory out of the plan."""


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
    """Physical GPUs; fractions only where two pipelines of a model share one at a position."""


@dataclass(frozen=True, slots=True)
class PooledPipeline:
    """Partitions in order, with the one batch size of them all."""

    batch: int
    throughput_rps: float
    """Of its smallest pool."""
    latency_us: Microseconds
    """Compute, transfers and batch building of one batch; excludes the margin."""
    partitions: tuple[PooledPartition, ...]


@dataclass(frozen=True, slots=True)
class PooledModelPlan:
    """How one model is served; `throughput_rps` is the sum over its pipelines."""

    name: str
    throughput_rps: float
    pipelines: tuple[PooledPipeline, ...]


@dataclass(frozen=True, slots=True)
class PooledPlan:
    """A solved planning task, and what it promises."""

    objective: float
    """Least throughput / weight over the models; for a given load its cost or number of GPUs."""
    bound: float
    """No plan within the rules does better."""
    optimal: bool
    """Proven: objective and bound differ by rounding only."""
    solver: str
    seconds: float
    models: tuple[PooledModelPlan, ...]
    utilisation: Mapping[str, float] = field(default_factory=dict)
    """Per class: share of the GPU time in use at the promised load."""
    binding: tuple[str, ...] = ()
    """In words: which models and classes keep the objective from being larger."""
