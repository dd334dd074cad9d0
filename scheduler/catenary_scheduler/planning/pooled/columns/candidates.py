"""Candidates: the pipelines of each model among which a solver may choose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns, enumerate_columns
from catenary_scheduler.planning.pooled.columns.device_tables import device_tables
from catenary_scheduler.planning.pooled.columns.pruning import undominated
from catenary_scheduler.planning.pooled.problem import PooledModel, PoolingProblem


@dataclass(frozen=True, slots=True)
class ColumnCandidates:
    """Pipelines of one model among which a solver may choose."""

    shareable: PipelineColumns
    """Every pipeline that keeps the SLO, with at most one pool on a level that is of use only when
    shared."""
    whole: PipelineColumns
    """The pipelines of `shareable` without such a pool."""
    pruned: PipelineColumns
    """The pipelines of `whole` that no other one makes superfluous."""


def candidates_of(problem: PoolingProblem, model: PooledModel) -> ColumnCandidates:
    tables = device_tables(problem, model)
    columns = enumerate_columns(model, tables, problem.max_partitions, most_spare=1)
    whole = columns.take(np.flatnonzero(~columns.spare.any(axis=1)))
    return ColumnCandidates(columns, whole, undominated(whole, len(problem.classes)))
