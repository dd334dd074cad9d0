"""Columns: every pipeline that keeps the SLO, by enumeration (PPipe's MILP chooses among the same).

A column is one pipeline: partitions with a device (class and level) each, cuts, and one batch size.
Enumeration extends all partial pipelines of a model by one partition at a time in NumPy, and drops
those that can no longer end within the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.columns.device_tables import DeviceTables, Floats, Ints
from catenary_scheduler.planning.pooled.problem import PooledModel

Flags = npt.NDArray[np.bool_]
NO_CLASS = -1
"""Marker in `gpu_class` for partitions that a shorter pipeline does not have."""


@dataclass(frozen=True, slots=True)
class PipelineColumns:
    """Feasible pipelines of one model.

    K is the largest number of partitions; shorter ones are padded.
    """

    gpu_class: Ints
    """Index into the problem's classes, shape (columns, K); `NO_CLASS` where there is no
    partition."""
    level: Ints
    """Virtual GPUs per GPU, shape (columns, K); 1 where there is no partition."""
    cuts: Ints
    """Boundaries, shape (columns, K + 1): partition i is blocks [cuts[i], cuts[i + 1])."""
    batch: Ints
    """Batch size, shape (columns,)."""
    latency_us: Floats
    """Microseconds of compute, transfers and batch building, shape (columns,)."""
    rate: Floats
    """Requests per second of one virtual GPU, shape (columns, K); inf where there is no
    partition."""
    spare: Flags
    """Mask, shape (columns, K): True if another level is as fast and yields as much per GPU, so
    that this one is of use only where a GPU is shared."""

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def rate_per_gpu(self) -> Floats:
        """Requests per second of a whole GPU of each partition, shape (columns, K)."""
        per_gpu: Floats = self.rate * self.level
        return per_gpu

    def pools_of(self, gpu_class: int) -> Ints:
        """Returns how many partitions of each column run on the class."""
        pools: Ints = (self.gpu_class == gpu_class).sum(axis=1)
        return pools

    def take(self, index: Ints | Flags) -> PipelineColumns:
        """Returns the columns that an index or mask selects."""
        return PipelineColumns(
            self.gpu_class[index],
            self.level[index],
            self.cuts[index],
            self.batch[index],
            self.latency_us[index],
            self.rate[index],
            self.spare[index],
        )


@dataclass(frozen=True, slots=True)
class _Partial:
    """Pipelines under construction, all of the same number of partitions."""

    devices: Ints
    cuts: Ints
    batch: Ints
    latency_us: Floats
    spare: Flags

    def take(self, index: Flags) -> _Partial:
        return _Partial(
            self.devices[index],
            self.cuts[index],
            self.batch[index],
            self.latency_us[index],
            self.spare[index],
        )


def enumerate_columns(
    model: PooledModel, tables: DeviceTables, max_partitions: int, *, most_spare: int
) -> PipelineColumns:
    """Returns the feasible pipelines of 1, 2, .. `max_partitions` partitions.

    Args:
        model: The model, with its blocks, SLO and margin.
        tables: The device tables of this model.
        max_partitions: Length of the longest pipeline.
        most_spare: Largest number of partitions on a spare level (see `PipelineColumns.spare`).
            Pools of whole GPUs never gain by such a level; a pool that shares a GPU may.
    """
    spare = _spare_levels(tables)
    if not most_spare:
        tables = replace(tables, latency_us=np.where(spare, np.inf, tables.latency_us))
    batches = tables.latency_us.shape[0]
    partial = _Partial(
        devices=np.zeros((batches, 0), dtype=np.int64),
        cuts=np.zeros((batches, 1), dtype=np.int64),
        batch=np.arange(1, batches + 1),
        latency_us=np.arange(batches, dtype=np.float64) * model.batch_build_us_per_row,
        spare=np.zeros((batches, 0), dtype=np.bool_),
    )
    found = []
    budget = model.slo_us - model.margin_us - _least_rest(tables.latency_us, model.blocks)
    for _ in range(min(max_partitions, model.blocks)):
        partial = _extend(partial, tables, spare, budget)
        partial = partial.take(partial.spare.sum(axis=1) <= most_spare)
        done = partial.cuts[:, -1] == model.blocks
        found.append(_columns(partial.take(done), tables, max_partitions))
        partial = partial.take(~done)
    return concatenate(found)


def concatenate(parts: list[PipelineColumns]) -> PipelineColumns:
    """Returns all columns of some parts, in the order of the parts."""
    return PipelineColumns(
        np.concatenate([part.gpu_class for part in parts]),
        np.concatenate([part.level for part in parts]),
        np.concatenate([part.cuts for part in parts]),
        np.concatenate([part.batch for part in parts]),
        np.concatenate([part.latency_us for part in parts]),
        np.concatenate([part.rate for part in parts]),
        np.concatenate([part.spare for part in parts]),
    )


def _columns(done: _Partial, tables: DeviceTables, width: int) -> PipelineColumns:
    rate = tables.rate[done.batch[:, None] - 1, done.devices, done.cuts[:, :-1], done.cuts[:, 1:]]
    pad = ((0, 0), (0, width - done.devices.shape[1]))
    return PipelineColumns(
        gpu_class=np.pad(tables.class_of[done.devices], pad, constant_values=NO_CLASS),
        level=np.pad(tables.level_of[done.devices], pad, constant_values=1),
        cuts=np.pad(done.cuts, pad, mode="edge"),
        batch=done.batch,
        latency_us=done.latency_us,
        rate=np.pad(rate, pad, constant_values=np.inf),
        spare=np.pad(done.spare, pad),
    )


def _spare_levels(tables: DeviceTables) -> Flags:
    """Returns a mask by (batch, device, first, last) of the spare levels.

    A level is spare if a sibling level is as fast and yields as much per GPU.
    """
    latency, per_gpu = tables.latency_us, tables.rate * tables.level_of[None, :, None, None]
    spare = np.zeros(latency.shape, dtype=np.bool_)
    for one, gpu_class in enumerate(tables.class_of):
        for other in np.flatnonzero(tables.class_of == gpu_class):
            if one != other:
                beaten = (latency[:, other] <= latency[:, one]) & (
                    per_gpu[:, other] >= per_gpu[:, one]
                )
                if other > one:  # of two equal levels the coarser one, which is listed first, stays
                    beaten &= (latency[:, other] < latency[:, one]) | (
                        per_gpu[:, other] > per_gpu[:, one]
                    )
                spare[:, one] |= beaten
    return spare


def _least_rest(latency: Floats, blocks: int) -> Floats:
    """Returns, by (batch, cut), a lower bound on the microseconds of compute behind the cut."""
    rest: Floats = np.zeros((latency.shape[0], blocks + 1))
    if latency.size:
        first = np.arange(blocks)
        one_block = latency[:, :, first, first + 1].min(axis=1)
        rest[:, :blocks] = np.cumsum(one_block[:, ::-1], axis=1)[:, ::-1]
    return rest


def _extend(partial: _Partial, tables: DeviceTables, spare: Flags, budget: Floats) -> _Partial:
    """Returns all partial pipelines with one more partition that may still keep the budget.

    Args:
        partial: The partial pipelines to extend.
        tables: The device tables of the model.
        spare: Mask by (batch, device, first, last); see `PipelineColumns.spare`.
        budget: Largest latency up to the end of a partition, by (batch, end), in microseconds.
    """
    index, cut = partial.batch - 1, partial.cuts[:, -1]
    total = tables.latency_us[index, :, cut, :] + partial.latency_us[:, None, None]
    if partial.devices.shape[1]:
        before = tables.class_of[partial.devices[:, -1]]
        hop = tables.transfer_us[before[:, None], tables.class_of[None, :], cut[:, None]]
        total += (partial.batch[:, None] * hop)[:, :, None]
    row, device, end = np.nonzero(total <= budget[index][:, None, :])
    is_spare = spare[index[row], device, cut[row], end]
    return _Partial(
        devices=np.concatenate([partial.devices[row], device[:, None]], axis=1),
        cuts=np.concatenate([partial.cuts[row], end[:, None]], axis=1),
        batch=partial.batch[row],
        latency_us=total[row, device, end],
        spare=np.concatenate([partial.spare[row], is_spare[:, None]], axis=1),
    )
