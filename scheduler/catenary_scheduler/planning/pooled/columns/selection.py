"""Selection of pipelines and their pools for the rates in cells of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.columns.sharing import PairMember
from catenary_scheduler.planning.pooled.columns.tables import TOLERANCE, Cell


@dataclass(frozen=True, slots=True)
class ChosenPipeline:
    """One pipeline of a solution, and the sizes of its pools."""

    columns: PipelineColumns
    index: int
    """Index of the pipeline in `columns`."""
    vgpus: tuple[int, ...]
    """Number of virtual GPUs of each partition; 0 behind the last one."""

    def pool_rates(self) -> Floats:
        """Returns the requests per second of each pool; inf behind the last partition."""
        rate = self.columns.rate[self.index]
        rates: Floats = np.where(
            np.isinf(rate), np.inf, np.nan_to_num(rate, posinf=0.0) * np.array(self.vgpus)
        )
        return rates

    @property
    def throughput_rps(self) -> float:
        """Requests per second of the slowest pool."""
        return float(self.pool_rates().min())


def gpus_for_rate(columns: PipelineColumns, rate: float) -> Ints:
    """Returns the whole GPUs that every pool needs for a rate, shape (columns, K)."""
    gpus: Ints = np.ceil(rate / columns.rate_per_gpu - TOLERANCE).astype(np.int64)
    return gpus


def quickest_pipeline(columns: PipelineColumns, cell: Cell, rate: float) -> ChosenPipeline:
    """Returns the pipeline of least latency that yields the rate with the GPUs of the cell.

    All feasible columns are examined, not only those that pruning kept, because one that yields
    less per GPU may suffice here and be faster.
    """
    gpus = gpus_for_rate(columns, rate * (1 - TOLERANCE))
    best = quickest_that_fits(columns, gpus, cell)
    return ChosenPipeline(columns, best, tuple((gpus[best] * columns.level[best]).tolist()))


def quickest_member(columns: PipelineColumns, member: PairMember) -> ChosenPipeline:
    """Returns the pipeline of least latency for one member of a pair."""
    place = member.place
    here = np.flatnonzero(
        (columns.gpu_class[:, place.position] == place.gpu_class)
        & (columns.level[:, place.position] == place.level)
    )
    some = columns.take(here)
    rate = member.rate * (1 - TOLERANCE)
    gpus = gpus_for_rate(some, rate)
    vgpus = np.ceil(rate / some.rate[:, place.position] - TOLERANCE).astype(np.int64)
    gpus[:, place.position] = np.ceil((vgpus - member.vgpus).clip(0) / place.level)
    best = quickest_that_fits(some, gpus, member.cell)
    counts = gpus[best] * some.level[best]
    counts[place.position] += member.vgpus
    return ChosenPipeline(columns, int(here[best]), tuple(counts.tolist()))


def quickest_that_fits(columns: PipelineColumns, gpus: Ints, cell: Cell) -> int:
    """Returns the column of least latency whose whole GPUs fit into the cell."""
    fits = np.ones(len(columns), dtype=np.bool_)
    for axis, limit in enumerate(cell):
        fits &= np.where(columns.gpu_class == axis, gpus, 0).sum(axis=1) <= limit
    found = np.flatnonzero(fits)
    return int(found[np.lexsort((gpus[found].sum(axis=1), columns.latency_us[found]))[0]])


def spend_left_over(
    chosen: Sequence[Sequence[ChosenPipeline]], loads: Sequence[float], counts: Sequence[int]
) -> list[list[ChosenPipeline]]:
    """Returns the pipelines after idle GPUs were given, one by one, to the most loaded pool.

    Args:
        chosen: Pipelines of each model.
        loads: Load of each model, which its pipelines share in proportion to their throughput.
        counts: Number of GPUs of each class in the cluster.
    """
    flat = [(model, pipeline) for model, some in enumerate(chosen) for pipeline in some]
    shares = _shares(chosen, loads)
    vgpus = [np.array(pipeline.vgpus) for _, pipeline in flat]
    for axis, free in enumerate(_free(chosen, counts)):
        pools = [
            (at, place)
            for at, (_, pipeline) in enumerate(flat)
            for place in np.flatnonzero(pipeline.columns.gpu_class[pipeline.index] == axis)
        ]
        if not pools:
            continue
        level = np.array([flat[at][1].columns.level[flat[at][1].index, p] for at, p in pools])
        rate = np.array([flat[at][1].columns.rate[flat[at][1].index, p] for at, p in pools])
        load = np.array([shares[at] for at, _ in pools])
        now = np.array([vgpus[at][place] for at, place in pools])
        at_once = max(1, free // 1000)  # a large cluster need not be filled one by one
        for begin in range(0, free, at_once):
            most = int((load / (now * rate)).argmax())
            now[most] += min(at_once, free - begin) * level[most]
        for (at, place), count in zip(pools, now, strict=True):
            vgpus[at][place] = count
    filled: list[list[ChosenPipeline]] = [[] for _ in chosen]
    for (model, pipeline), counted in zip(flat, vgpus, strict=True):
        filled[model].append(
            ChosenPipeline(pipeline.columns, pipeline.index, tuple(counted.tolist()))
        )
    return filled


def used_gpus(chosen: Sequence[Sequence[ChosenPipeline]], classes: int) -> list[int]:
    """Returns the number of whole GPUs of each class that are in use.

    Pools of one model, position and class may share GPUs: their fractions are rounded up together.
    """
    used = [0] * classes
    for pipelines in chosen:
        fractions: dict[tuple[int, int], float] = {}
        for pipeline in pipelines:
            gpu_class = pipeline.columns.gpu_class[pipeline.index]
            level = pipeline.columns.level[pipeline.index]
            for position, vgpus in enumerate(pipeline.vgpus):
                if vgpus:
                    key = (int(gpu_class[position]), position)
                    fractions[key] = fractions.get(key, 0.0) + vgpus / int(level[position])
        for (axis, _), fraction in fractions.items():
            used[axis] += int(np.ceil(fraction - TOLERANCE))
    return used


def _free(chosen: Sequence[Sequence[ChosenPipeline]], counts: Sequence[int]) -> list[int]:
    used = used_gpus(chosen, len(counts))
    return [count - taken for count, taken in zip(counts, used, strict=True)]


def _shares(chosen: Sequence[Sequence[ChosenPipeline]], loads: Sequence[float]) -> list[float]:
    """Returns the load of each pipeline, for the pipelines of all models in order."""
    shares = []
    for pipelines, load in zip(chosen, loads, strict=True):
        total = sum(pipeline.throughput_rps for pipeline in pipelines)
        shares += [load * pipeline.throughput_rps / total for pipeline in pipelines]
    return shares
