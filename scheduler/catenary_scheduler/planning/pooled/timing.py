"""Timing of pipelines and pools: the definitions of latency and rate that every planner shares.

Latency = compute of every partition + batch x transfer of one request at every cut + the time until
the batch is full. Rate of a virtual GPU = what its compute allows, capped by its share of the
server's uplink and downlink (PPipe, appendix A.2 with the artifact's additions).
"""

from __future__ import annotations

from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    Microseconds,
    PooledModel,
    PooledPartition,
)
from catenary_services.errors import InvalidInput


def transfer_us(size_bytes: int, sender: GpuClass, receiver: GpuClass) -> Microseconds:
    """Returns the microseconds that one request's feature map takes between two servers."""
    slowest = min(sender.server_bits_per_second, receiver.server_bits_per_second)
    return size_bytes * 8e6 / slowest


def link_rate_rps(size_bytes: int, gpu: GpuClass, level: int) -> float:
    """Returns the requests per second that a virtual GPU's share of its server's link carries."""
    if size_bytes == 0:
        return float("inf")
    return gpu.server_bits_per_second / (size_bytes * 8.0) / (level * gpu.gpus_per_server)


def batch_building_us(model: PooledModel, batch: int) -> Microseconds:
    """Returns the microseconds that the first row of a batch waits for the last one."""
    return (batch - 1) * model.batch_build_us_per_row


def compute_us(model: PooledModel, partition: PooledPartition, batch: int) -> Microseconds:
    """Returns the microseconds that a virtual GPU computes the partition.

    Raises InvalidInput if that was not profiled.
    """
    times = model.latency_us.get((partition.gpu, partition.level))
    if times is None or batch > times.shape[1]:
        raise InvalidInput(
            model.name,
            f"no profile on 1/{partition.level} of a {partition.gpu} with batch {batch}",
        )
    return float(times[partition.first_block : partition.last_block, batch - 1].sum())


def pool_rate_rps(
    model: PooledModel, gpu: GpuClass, partition: PooledPartition, batch: int
) -> float:
    """Returns the requests per second of a whole pool: its virtual GPUs times the rate of one."""
    one = min(
        1e6 * batch / compute_us(model, partition, batch),
        link_rate_rps(model.cut_bytes[partition.first_block], gpu, partition.level),
        link_rate_rps(model.cut_bytes[partition.last_block], gpu, partition.level),
    )
    return one * partition.vgpus
