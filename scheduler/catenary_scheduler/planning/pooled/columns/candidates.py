"""Per model the pipelines a solver may choose among."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns, enumerate_columns
from catenary_scheduler.planning.pooled.columns.device_tables import device_tables
from catenary_scheduler.planning.pooled.columns.pruning import undominated
from catenary_scheduler.planning.pooled.problem import PooledModel, PoolingProblem


@dataclass(frozen=True, slots=True)
class ColumnCandidates:
    """Of one model."""

    shareable: PipelineColumns
    """Every pipeline that keeps the SLO; at most one pool on a level of use only when shared."""
    whole: PipelineColumns
    """Those of them without such a pool."""
    pruned: PipelineColumns
    """Those of `whole` that no other makes superfluous."""


def candidates_of(problem: PoolingProblem, model: PooledModel) -> ColumnCandidates:
    """Returns the candidates of a model."""
    tables = device_tables(problem, model)
    columns = enumerate_columns(model, tables, problem.max_partitions, most_spare=1)
    whole = columns.take(np.flatnonzero(~columns.spare.any(axis=1)))
    return ColumnCandidates(columns, whole, undominated(whole, len(problem.classes)))
