"""Our own rules: any number of pipelines per model, on whole GPUs or with two sharing one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from catenary_scheduler.planning.pooled.columns.axes import TableAxes
from catenary_scheduler.planning.pooled.columns.candidates import ColumnCandidates
from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.columns.selection import (
    ChosenPipeline,
    quickest_member,
    quickest_pipeline,
)
from catenary_scheduler.planning.pooled.columns.sharing import PairMember, PairTable
from catenary_scheduler.planning.pooled.columns.tables import Cell, single_table
from catenary_scheduler.planning.pooled.rules.closure import RateTable


class FreeRateTable:
    """Best rates of one model, and the pipelines behind them."""

    def __init__(
        self, candidates: ColumnCandidates, axes: TableAxes, *, share: bool = True
    ) -> None:
        """Fills the table of rates.

        Args:
            candidates: The model's pipelines.
            axes: The axes of the table.
            share: Whether two pipelines may share a GPU; False is for comparison with HiGHS.
        """
        self._candidates = candidates
        self._axes = axes
        self._single = single_table(candidates.pruned, axes.order, axes.counts)
        self._closure = RateTable(self._single)
        if share:
            self._pairs = PairTable(candidates.shareable, axes.order, self._closure.table)
            if self._pairs.table.any():
                self._closure = RateTable(np.maximum(self._single, self._pairs.table))

    @property
    def table(self) -> Floats:
        """Best rate by number of whole GPUs of each class."""
        return self._closure.table

    def pipelines(self, cell: Cell, share: float = 1.0) -> list[ChosenPipeline]:
        """Returns the pipelines that yield the rate of a cell, or a share of it."""
        chosen = []
        for (part, rate), times in Counter(self._closure.parts(cell)).items():
            if self._single[part] >= rate:
                # Several pipelines of one kind are one pipeline with larger pools.
                together = self._axes.to_classes(tuple(times * gpus for gpus in part))
                asked = share * times * rate
                chosen.append(quickest_pipeline(self._candidates.whole, together, asked))
            else:
                pair = self._pairs.at(part)
                chosen += [
                    self._member(pair.first, share),
                    self._member(pair.second, share),
                ] * times
        return merged(chosen)

    def _member(self, member: PairMember, share: float) -> ChosenPipeline:
        cell = self._axes.to_classes(member.cell)
        in_classes = replace(member, cell=cell, rate=share * member.rate)
        return quickest_member(self._candidates.shareable, in_classes)


def merged(chosen: Sequence[ChosenPipeline]) -> list[ChosenPipeline]:
    """Returns the pipelines after those of the same column were joined."""
    found: dict[tuple[bytes, ...], ChosenPipeline] = {}
    for pipeline in chosen:
        columns, at = pipeline.columns, pipeline.index
        parts = (columns.gpu_class, columns.level, columns.cuts, columns.batch)
        key = tuple(part[at].tobytes() for part in parts)
        other = found.get(key)
        more = other.vgpus if other else (0,) * len(pipeline.vgpus)
        vgpus = tuple(a + b for a, b in zip(pipeline.vgpus, more, strict=True))
        found[key] = replace(pipeline, vgpus=vgpus)
    return list(found.values())
