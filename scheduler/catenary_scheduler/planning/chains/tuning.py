"""Tuning of c, the number of sessions at a time for which every block has room.

A small c puts more blocks on a server, which gives fewer hops and faster chains, but fewer of them.
A large c leaves more memory to caches. The lower bound of Theorem 3.7 is the default measure: in
simulation it stays within 2 % of the best c, where the upper bound and the surrogate c K(c) lose up
to 23 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from catenary_scheduler.planning.chains.early import bounded_response_s
from catenary_scheduler.planning.chains.gca import cut_chains
from catenary_scheduler.planning.chains.problem import (
    ChainTask,
    Composition,
    Evaluator,
    PeakRate,
    Tuning,
)
from catenary_scheduler.planning.chains.search import (
    PlacementCandidate,
    candidates,
    compose_at,
    least_service_s,
    least_surrogate,
)
from catenary_scheduler.planning.chains.sizes import Blocks, TaskSizes, sizes_of
from catenary_services.errors import InvalidInput, PlanInfeasible

TIED = 1e-12
"""Relative difference up to which two values of c count as equal, and the smaller one wins."""


@dataclass(frozen=True, slots=True)
class TunedCapacity:
    """The best c by some measure, and its response time."""

    c: int
    response_s: float
    """Least mean response time in seconds, by that measure."""


def compose(task: ChainTask, c: int) -> Composition:
    """Returns the chains for one c by GBP-CR, then GCA.

    Raises:
        InvalidInput: c is below 1.
    """
    if c < 1:
        raise InvalidInput("c", "must be at least 1")
    return compose_at(task, sizes_of(task), c)


def best_composition(task: ChainTask, tune: Tuning = "lower") -> Composition:
    """Returns the chains for the best c.

    If the load is more than any c can serve, the chains with the greatest total rate are returned,
    and `stable` is False.

    Args:
        task: The task to plan.
        tune: The measure: the "lower" or "upper" bound of Theorem 3.7, the "surrogate" c K(c) of
            the paper, the lower bound at a `PeakRate`, or a function from a composition to its mean
            response time in seconds. The function is called once for each different placement, some
            20 times with two types of servers.

    Raises:
        PlanInfeasible: No c gives any chain through all blocks.
    """
    sizes = sizes_of(task)
    chosen = _chosen_c(task, sizes, tune)
    if chosen is None:
        chosen = greatest_rate(task, sizes)
    if chosen is None:
        raise PlanInfeasible(_why_infeasible(task, sizes))
    return compose_at(task, sizes, chosen)


def _chosen_c(task: ChainTask, sizes: TaskSizes, tune: Tuning) -> int | None:
    if tune == "surrogate":
        least = least_surrogate(task, sizes)
        return None if least is None else least[0]
    if isinstance(tune, PeakRate):
        tuned = tune_by_bound(task.at_rate(tune.rate_per_s), sizes=sizes)
    elif callable(tune):
        tuned = tune_by_evaluation(task, tune, sizes)
    elif tune in {"lower", "upper"}:
        tuned = tune_by_bound(task, upper=tune == "upper", sizes=sizes)
    else:
        raise InvalidInput("tune", f"{tune!r} is neither lower, upper, surrogate nor a function")
    return None if tuned is None else tuned.c


def tune_by_bound(
    task: ChainTask, *, upper: bool = False, sizes: TaskSizes | None = None
) -> TunedCapacity | None:
    """Returns the c with the least response bound; None if the load is too high for every c."""
    sizes = sizes or sizes_of(task)
    arrivals = float(task.rate_per_s)
    best: TunedCapacity | None = None

    def worth(limits: Blocks) -> bool:
        linked = task.links is not None  # with links, tau_c does not bound a hop
        return best is None or linked or least_service_s(sizes, limits) < best.response_s

    for candidate in candidates(task, sizes, worth):
        worst = math.inf if best is None else best.response_s
        response = bounded_response_s(
            cut_chains(task, sizes, candidate.ranges(), candidate.slots(sizes)),
            arrivals,
            worst,
            upper=upper,
        )
        if response is not None and (best is None or response < best.response_s * (1.0 - TIED)):
            best = TunedCapacity(candidate.c, response)
    return best


def tune_by_evaluation(
    task: ChainTask, evaluator: Evaluator, sizes: TaskSizes | None = None
) -> TunedCapacity | None:
    """Returns the c with the least response by the evaluator; None if that is never finite.

    It starts with the c of the lower bound, which stays unless another one is better.
    """
    sizes = sizes or sizes_of(task)
    bound = tune_by_bound(task, sizes=sizes)
    best: TunedCapacity | None = None
    values = [] if bound is None else [bound.c]
    values += [each.c for each in candidates(task, sizes) if bound is None or each.c != bound.c]
    for c in values:
        response = evaluator(compose_at(task, sizes, c))
        if math.isfinite(response) and (best is None or response < best.response_s * (1.0 - TIED)):
            best = TunedCapacity(c, response)
    return best


def greatest_rate(task: ChainTask, sizes: TaskSizes) -> int | None:
    """Returns the c whose chains together finish most sessions per second; None without a chain."""
    best: tuple[float, int] | None = None
    for candidate in candidates(task, sizes):
        capacities, rates = _job_servers(task, sizes, candidate)
        total = math.fsum(c * mu for c, mu in zip(capacities, rates, strict=True))
        if total > 0 and (best is None or total > best[0] * (1.0 + TIED)):
            best = (total, candidate.c)
    return None if best is None else best[1]


def _job_servers(
    task: ChainTask, sizes: TaskSizes, candidate: PlacementCandidate
) -> tuple[list[int], list[float]]:
    cuts = list(cut_chains(task, sizes, candidate.ranges(), candidate.slots(sizes)))
    return [capacity for _, capacity, _ in cuts], [1.0 / service_s for *_, service_s in cuts]


def _why_infeasible(task: ChainTask, sizes: TaskSizes) -> str:
    room = int(sizes.max_blocks(1).sum())
    if room < task.blocks:
        return (
            f"the {len(task.servers)} servers have room for {room} of {task.blocks} blocks with "
            f"one session each"
        )
    return f"the servers give no chain through all {task.blocks} blocks"
