"""Division of the GPUs among the models, with one of several known shares for each.

The programme has a row per class and one per model, whatever the number of pipelines, and whoever
asks for fractions of shares gets prices at which better shares can be sought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.solving.shares import ModelShare
from catenary_scheduler.planning.pooled.solving.sparse import INFINITY, ProgrammeBuilder

_MOST_OF_MODEL = 50
"""Number of shares of each model among which whole ones are chosen."""


@dataclass(frozen=True, slots=True)
class DivisionInParts:
    """Best division where a model may have fractions of several shares."""

    used: float
    """Largest part of a class that is used; 1 is all of it."""
    prices: Floats
    """Price of a GPU of each class at which the whole cluster costs 1."""
    parts: tuple[Floats, ...]
    """Part of each share, by model."""


def divide_in_fractions(counts: Ints, shares: Sequence[Sequence[ModelShare]]) -> DivisionInParts:
    """Returns the division that uses the least part of the cluster, fractions allowed.

    Args:
        counts: Number of GPUs of each class.
        shares: Shares of each model, one of which it gets.
    """
    builder, at = _programme(counts, shares, whole=False)
    solver = _solver(builder)
    solver.run()
    solution = solver.getSolution()
    values, duals = np.array(solution.col_value), np.array(solution.row_dual)
    used = float(solver.getInfo().objective_function_value)
    prices = np.maximum(-duals[: len(counts)], 0.0)
    return DivisionInParts(used, prices, tuple(values[index] for index in at))


def round_division(
    counts: Ints, shares: Sequence[Sequence[ModelShare]], division: DivisionInParts
) -> list[ModelShare] | None:
    """Returns a whole share of each model near a division in fractions, or None if none fit.

    Few models have fractions. From the largest of these, one model after the other gets another
    share as long as that leaves less over.
    """
    gpus = np.array([share.gpus for some in shares for share in some])
    model = np.repeat(np.arange(len(shares)), [len(some) for some in shares])
    first = np.searchsorted(model, np.arange(len(shares)))
    chosen = first + np.array([int(parts.argmax()) for parts in division.parts])
    used = gpus[chosen].sum(axis=0)
    while (over := int(np.maximum(used - counts, 0).sum())) > 0:
        after = used + gpus - gpus[chosen][model]
        left = np.maximum(after - counts, 0).sum(axis=1)
        best = int(np.lexsort((after @ division.prices, left))[0])
        if left[best] >= over:
            return None
        used, chosen[model[best]] = after[best], best
    return [some[at] for some, at in zip(shares, (chosen - first).tolist(), strict=True)]


def divide(
    counts: Ints, shares: Sequence[Sequence[ModelShare]], prices: Floats, seconds: float
) -> list[ModelShare] | None:
    """Returns a share of each model so that all fit together; None if none were found in time.

    Args:
        counts: Number of GPUs of each class.
        shares: Shares of each model.
        prices: Price of a GPU of each class; only the cheapest shares are tried.
        seconds: Time limit.
    """
    some = []
    for of_model in shares:
        cost = np.array([share.gpus for share in of_model]) @ prices
        order = np.argsort(cost, kind="stable")[:_MOST_OF_MODEL]
        some.append([of_model[at] for at in order.tolist()])
    builder, at = _programme(counts, some, whole=True)
    solver = _solver(builder)
    solver.setOptionValue("time_limit", seconds)
    solver.setOptionValue("objective_target", 1.0)
    solver.run()
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    values = np.array(solver.getSolution().col_value)
    chosen = [
        of_model[int(values[index].argmax())] for of_model, index in zip(some, at, strict=True)
    ]
    used = np.array([share.gpus for share in chosen]).sum(axis=0)
    return chosen if (used <= counts).all() else None


def _programme(
    counts: Ints, shares: Sequence[Sequence[ModelShare]], *, whole: bool
) -> tuple[ProgrammeBuilder, list[Ints]]:
    """Returns the programme, and the indices of each model's shares."""
    builder = ProgrammeBuilder()
    # No class is used beyond this part of it.
    most = builder.variables(np.array([1.0 if whole else INFINITY]), integer=False)
    at = [builder.variables(np.full(len(some), INFINITY), integer=whole) for some in shares]
    flat = np.concatenate(at)
    gpus = np.array([share.gpus for some in shares for share in some], dtype=np.float64)
    for axis, count in enumerate(counts.tolist()):
        builder.row(
            np.append(flat, most),
            np.append(gpus[:, axis], -float(count)),
            least=-INFINITY,
            most=0.0,
        )
    for index in at:
        builder.row(index, np.ones(len(index)), least=1.0, most=1.0)
    builder.minimise(most, 1.0)
    return builder, at


def _solver(builder: ProgrammeBuilder) -> highspy.Highs:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(builder.build())
    return solver
