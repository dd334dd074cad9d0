"""Dynamic programme over whole GPUs: proven optimal, in milliseconds at 100 GPUs.

It follows section 4 of the specification: a table per model (`free_rules`), then the
division of the GPUs among the models (`coupling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from catenary_scheduler.planning.pooled.assembly import PooledSolution, price_of
from catenary_scheduler.planning.pooled.columns.axes import TableAxes
from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline
from catenary_scheduler.planning.pooled.columns.tables import Cell
from catenary_scheduler.planning.pooled.objectives import MaxThroughput, Objective, price_per_gpu
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.pooled.solving.coupling import best_target, cheapest_cells


class ModelRateTable(Protocol):
    """Best rates of one model, and the pipelines behind them."""

    @property
    def table(self) -> Floats:
        """Best rate by number of whole GPUs of each class. It never falls with more GPUs."""
        ...

    def pipelines(self, cell: Cell, share: float = 1.0) -> list[ChosenPipeline]:
        """Returns the pipelines that yield the rate of a cell, or a share of it."""
        ...


def solve_exactly(
    problem: PoolingProblem,
    models: Sequence[ModelRateTable],
    axes: TableAxes,
    objective: Objective,
    rates: Sequence[float] | None,
) -> PooledSolution | None:
    """Returns an optimal solution, or None if the cluster is too small.

    Args:
        problem: The cluster and the models.
        models: Rate table of each model.
        axes: The axes of the tables.
        objective: The objective of the plan.
        rates: Rate that each model must reach; None asks for the most throughput.
    """
    tables = [model.table for model in models]
    weights = [model.weight for model in problem.models]
    if rates is None:
        target = best_target(tables, weights)
        if target <= 0:
            return None
        rates = [weight * target for weight in weights]
    prices = price_per_gpu(problem, objective)
    cells = cheapest_cells(tables, rates, [prices[index] for index in axes.order])
    if cells is None:
        return None
    if isinstance(objective, MaxThroughput):
        # Rate beyond a model's weight costs nothing and carries bursts, so it is kept.
        chosen = [model.pipelines(cell) for model, cell in zip(models, cells, strict=True)]
        value = rates[0] / weights[0]
    else:
        chosen = [
            model.pipelines(cell, min(1.0, rate / float(model.table[cell])))
            for model, cell, rate in zip(models, cells, rates, strict=True)
        ]
        value = price_of(problem, chosen, objective)
    return PooledSolution(chosen, value, value, True, "dp")
