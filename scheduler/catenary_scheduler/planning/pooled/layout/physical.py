"""Packing of virtual GPUs onto physical GPUs: whole ones, and those that two pipelines share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, lcm
from typing import NamedTuple

from catenary_scheduler.planning.pooled.problem import GpuClass
from catenary_services.errors import PlanInfeasible


class PoolId(NamedTuple):
    """Key of a pool: the indices of model, pipeline and stage in the plan."""

    model: int
    pipeline: int
    position: int


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """GPUs that a pool needs, and the transfers of each of its virtual GPUs."""

    pool: PoolId
    gpu: str
    level: int
    vgpus: int
    batches_per_second: float
    """Batches per second of each virtual GPU at the promised rate."""
    send_s: float
    """Seconds for which one batch occupies the uplink; 0 for the last stage."""
    receive_s: float
    """Seconds for which one batch occupies the downlink; 0 for the first stage."""
    sent_after_s: float
    """Seconds from the dispatch of a batch to the end of its compute here, if nothing waits."""
    received_after_s: float
    """Seconds from the dispatch of a batch to its transfer to here, if nothing waits."""
    slack_s: float
    """Seconds that a batch may wait on its whole way without being late."""


@dataclass(frozen=True, slots=True)
class PhysicalGpu:
    """A physical GPU in use, with the pool of each of its virtual GPUs."""

    hosted: tuple[PoolLoad, ...]


def physical_gpus(gpu_class: GpuClass, pools: Sequence[PoolLoad]) -> list[PhysicalGpu]:
    """Returns the GPUs filled pool by pool. Remainders of one model and position share GPUs.

    Raises PlanInfeasible if the class has too few GPUs.
    """

    def place(pool: PoolLoad) -> tuple[int, int]:
        return (pool.pool.model, pool.pool.position)

    gpus: list[PhysicalGpu] = []
    for _, group in groupby(sorted(pools, key=place), key=place):
        remainders: list[PoolLoad] = []
        for pool in group:
            whole, rest = divmod(pool.vgpus, pool.level)
            gpus += [PhysicalGpu((pool,) * pool.level)] * whole
            remainders += [pool] * rest
        gpus += [PhysicalGpu(tuple(shared)) for shared in _share(remainders)]
    if len(gpus) > gpu_class.count:
        raise PlanInfeasible(
            f"the plan needs {len(gpus)} GPUs of class {gpu_class.name}, "
            f"the cluster has {gpu_class.count}"
        )
    return gpus


def _share(vgpus: list[PoolLoad]) -> list[list[PoolLoad]]:
    """Packs a few virtual GPUs into as few GPUs as their sum needs, if that is possible at all.

    The search is first fit, the largest first, and backtracks where that fails. It is small: each
    pool has fewer virtual GPUs here than its level, and there are few pools.
    """
    vgpus = sorted(vgpus, key=lambda pool: pool.level)
    whole = lcm(*(pool.level for pool in vgpus))
    bins: list[list[PoolLoad]] = []
    room: list[int] = []
    hopeless: set[tuple[int, int, tuple[int, ...]]] = set()

    def put(at: int, most: int) -> bool:
        if at == len(vgpus):
            return True
        state = (most, at, tuple(sorted(room)))
        if state in hopeless:
            return False
        size = whole // vgpus[at].level
        tried = set()
        for index in range(len(bins)):
            if room[index] >= size and room[index] not in tried:
                tried.add(room[index])
                bins[index].append(vgpus[at])
                room[index] -= size
                if put(at + 1, most):
                    return True
                bins[index].pop()
                room[index] += size
        if len(bins) < most:
            bins.append([vgpus[at]])
            room.append(whole - size)
            if put(at + 1, most):
                return True
            bins.pop()
            room.pop()
        hopeless.add(state)
        return False

    most = ceil(sum(whole // pool.level for pool in vgpus) / whole)
    while not put(0, most):
        most += 1
    return bins
