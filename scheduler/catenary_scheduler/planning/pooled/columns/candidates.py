"""Per model the pipelines a solver may choose among."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import Columns, enumerate_columns
from catenary_scheduler.planning.pooled.columns.device_tables import device_tables
from catenary_scheduler.planning.pooled.columns.pruning import undominated
from catenary_scheduler.planning.pooled.problem import PooledModel, PoolingProblem


@dataclass(frozen=True, slots=True)
class Candidates:
    """Of one model."""

    shareable: Columns
    """Every pipeline that keeps the SLO; at most one pool on a level of use only when shared."""
    whole: Columns
    """Those of them without such a pool."""
    pruned: Columns
    """Those of `whole` that no other makes superfluous."""


def candidates_of(problem: PoolingProblem, model: PooledModel) -> Candidates:
    """Returns the candidates of a model."""
    tables = device_tables(problem, model)
    columns = enumerate_columns(model, tables, problem.max_partitions, most_spare=1)
    whole = columns.take(np.flatnonzero(~columns.spare.any(axis=1)))
    return Candidates(columns, whole, undominated(whole, len(problem.classes)))
