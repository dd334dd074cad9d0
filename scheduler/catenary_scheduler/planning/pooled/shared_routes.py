"""Shared routes: ways of models through pools that a plan made for others.

Own pools are made for the mean load, and a burst hits those of one model while others idle. So the
plan stays as it is, and a model gets, beside its own pipelines, routes through the pools of other
models: its own blocks, cut anew so that the pools, as large as they are, take as many of its
requests as possible. A shared route promises nothing and keeps no margin: the probe knows whether
a batch is in time, and the dispatcher uses only time that the owner of the pools leaves.

What is not loaded cannot be switched to in time, so every GPU of the pools holds the blocks of its
guests as well. Memory decides how many there are: models take turns, the one with the least
capacity in others' pools (in shares of its own) first, and each takes its largest route that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import combinations, pairwise
from math import comb
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    PooledModel,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
    SharedRoute,
)
from catenary_scheduler.planning.pooled.timing import (
    batch_building_us,
    link_rate_rps,
    transfer_us,
)

MOST_ROUTES = 8
"""The most shared routes of a model, and the most guests of a pipeline. Every route costs a probe
where all routes before it were full."""

MOST_CUTS = 10_000
"""The most ways to cut a model that are tried for one host, each of which takes some 30 us."""


class HostPool(NamedTuple):
    """A pool as a guest sees it: GPUs of one kind, and the blocks they hold for its owner."""

    gpu: str
    level: int
    members: int


class HostPipeline(NamedTuple):
    """The pools of a pipeline, and the numbers of the models that may not be guests there."""

    barred: frozenset[int]
    pools: tuple[HostPool, ...]


class Guest(NamedTuple):
    """A model that may take routes through pools of others."""

    number: int
    model: PooledModel
    throughput_rps: float
    """Rate that its own pipelines promise."""


class Room(Protocol):
    """The memory of the GPUs of pools that nothing is planned to be in."""

    def take(self, host: int, sizes: Sequence[int]) -> bool:
        """Takes a size in bytes from each GPU of every pool of a pipeline.

        Returns False, and takes nothing, if a GPU has too little.
        """
        ...


class _PooledRoom:
    """Room on the GPUs of a plan, each of which is in one pool."""

    def __init__(self, problem: PoolingProblem, plan: PooledPlan) -> None:
        memory = {gpu.name: gpu.memory_bytes for gpu in problem.classes}
        models = {model.name: model for model in problem.models}
        self._left: list[list[float]] = []
        for served in plan.models:
            for pipeline in served.pipelines:
                sizes = weights_of(models[served.name], pipeline.partitions)
                self._left.append(
                    [
                        float("inf") if size is None else size / part.level - weight
                        for part, weight in zip(pipeline.partitions, sizes, strict=True)
                        for size in (memory[part.gpu],)
                    ]
                )

    def take(self, host: int, sizes: Sequence[int]) -> bool:
        left = self._left[host]
        if any(size > room for size, room in zip(sizes, left, strict=True)):
            return False
        self._left[host] = [room - size for size, room in zip(sizes, left, strict=True)]
        return True


def with_shared_routes(problem: PoolingProblem, plan: PooledPlan) -> PooledPlan:
    """Returns a plan with routes of its models through the pools of others, as memory allows."""
    models = {model.name: model for model in problem.models}
    hosts: list[HostPipeline] = []
    places: list[tuple[int, int]] = []
    for owner, served in enumerate(plan.models):
        for which, pipeline in enumerate(served.pipelines):
            pools = [HostPool(part.gpu, part.level, part.vgpus) for part in pipeline.partitions]
            hosts.append(HostPipeline(frozenset((owner,)), tuple(pools)))
            places.append((owner, which))
    guests = [
        Guest(number, models[served.name], served.throughput_rps)
        for number, served in enumerate(plan.models)
    ]
    classes = {gpu.name: gpu for gpu in problem.classes}
    chosen = shared_routes(guests, hosts, classes, _PooledRoom(problem, plan))
    return replace(
        plan,
        models=tuple(
            replace(
                served,
                shared=tuple(
                    SharedRoute(*places[route.host], route.pipeline)
                    for route in chosen.get(number, ())
                ),
            )
            for number, served in enumerate(plan.models)
        ),
    )


@dataclass(frozen=True, slots=True)
class ChosenRoute:
    """A route of a guest through a pipeline, which is named by its number."""

    host: int
    pipeline: PooledPipeline


def shared_routes(
    guests: Sequence[Guest],
    hosts: Sequence[HostPipeline],
    classes: Mapping[str, GpuClass],
    room: Room,
) -> dict[int, list[ChosenRoute]]:
    """Returns the routes of every guest through pipelines of others, the largest first.

    Hosts are numbered by `room`.
    """
    open_to: dict[int, list[ChosenRoute]] = {}
    of_number = {guest.number: guest for guest in guests}
    for guest in guests:
        fitted: dict[tuple[HostPool, ...], PooledPipeline | None] = {}
        found = []
        for number, host in enumerate(hosts):
            if guest.number in host.barred:
                continue
            if host.pools not in fitted:
                fitted[host.pools] = fit(guest.model, host.pools, classes)
            pipeline = fitted[host.pools]
            if pipeline is not None:
                found.append(ChosenRoute(number, pipeline))
        found.sort(key=lambda route: route.pipeline.throughput_rps)
        open_to[guest.number] = found
    visitors = [0] * len(hosts)
    chosen: dict[int, list[ChosenRoute]] = {number: [] for number in of_number}
    turns = [(0.0, number) for number in open_to]
    heapify(turns)
    while turns:
        taken, number = turns[0]
        if not open_to[number] or len(chosen[number]) >= MOST_ROUTES:
            heappop(turns)
            continue
        route = open_to[number].pop()
        sizes = weights_of(of_number[number].model, route.pipeline.partitions)
        if visitors[route.host] >= MOST_ROUTES or not room.take(route.host, sizes):
            continue
        chosen[number].append(route)
        visitors[route.host] += 1
        own = max(of_number[number].throughput_rps, 1e-9)
        heapreplace(turns, (taken + route.pipeline.throughput_rps / own, number))
    return chosen


def weights_of(model: PooledModel, partitions: Sequence[PooledPartition]) -> list[int]:
    """Returns the bytes of a model's weights in each partition; zeros where they are not known."""
    weights = model.block_weight_bytes
    return [sum(weights[part.first_block : part.last_block]) for part in partitions]


def fit(
    model: PooledModel, pools: Sequence[HostPool], classes: Mapping[str, GpuClass]
) -> PooledPipeline | None:
    """Returns the blocks of a model on each of some pools that serve most.

    The batch size is the one that serves most within the whole SLO. None if no cut is in time, or
    there are too many to try.
    """
    if not 0 < len(pools) <= model.blocks or comb(model.blocks - 1, len(pools) - 1) > MOST_CUTS:
        return None
    ends: list[npt.NDArray[np.float64]] = []
    for pool in pools:
        times = model.latency_us.get((pool.gpu, pool.level))
        if times is None:
            return None
        ends.append(np.vstack([np.zeros((1, times.shape[1])), np.cumsum(times, axis=0)]))
    sizes = min(each.shape[1] for each in ends)
    batches = np.arange(1, sizes + 1)
    building = np.array([batch_building_us(model, batch) for batch in batches.tolist()])
    best: PooledPipeline | None = None
    for inner in combinations(range(1, model.blocks), len(pools) - 1):
        cuts = (0, *inner, model.blocks)
        row_us = sum(
            transfer_us(model.cut_bytes[cut], classes[one.gpu], classes[other.gpu])
            for cut, (one, other) in zip(inner, pairwise(pools), strict=True)
        )
        spent = [
            (end[last] - end[first])[:sizes]
            for end, (first, last) in zip(ends, pairwise(cuts), strict=True)
        ]
        latency = np.sum(spent, axis=0) + batches * row_us + building
        rates = np.minimum.reduce(
            [
                pool.members * np.minimum(1e6 * batches / us, _link_rps(model, pool, cut, classes))
                for pool, us, cut in zip(pools, spent, pairwise(cuts), strict=True)
            ]
        )
        rates[latency > model.slo_us] = 0.0
        at = int(rates.argmax())
        if rates[at] > (best.throughput_rps if best is not None else 0.0):
            best = PooledPipeline(
                at + 1,
                float(rates[at]),
                float(latency[at]),
                tuple(
                    PooledPartition(
                        pool.gpu, pool.level, first, last, pool.members, pool.members / pool.level
                    )
                    for pool, (first, last) in zip(pools, pairwise(cuts), strict=True)
                ),
            )
    return best


def _link_rps(
    model: PooledModel, pool: HostPool, cuts: tuple[int, int], classes: Mapping[str, GpuClass]
) -> float:
    """Returns the requests per second that a GPU's links carry into and out of its blocks."""
    gpu = classes[pool.gpu]
    return min(link_rate_rps(model.cut_bytes[cut], gpu, pool.level) for cut in cuts)
