"""Number of scheduler groups that a cluster needs (Aladdin, Appendix A, eq. 8).

Requests go round robin to groups, so group i of N_i of all N_w workers gets the rate
r_i = N_i / N_w * r_a. Every second group wastes one worker on average, half a worker each: a waste
of at most a share e of N_i workers needs N_i >= 1 / (2e). A scheduler answers within its latency
bound T_s up to a rate r(T_s) only. Eq. 8 as read here (R13): N_i >= ceil(1 / (2e)),
r_i <= r(T_s), sum r_i = r_a, and of all divisions the one with the fewest groups, which wastes
least. A single group wastes nothing by being divided, so its size has no lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from catenary_services.errors import InvalidInput, PlanInfeasible

USUAL_DECISION_US = 100.0
"""Microseconds of a placement decision, where nobody has measured one."""
USUAL_LATENCY_MS = 5.0
"""Longest mean time until a request is placed, T_s, in milliseconds, unless another is given."""
USUAL_WASTE_RATIO = 0.1
"""Share e of its workers that a group may waste, unless another is given."""


@dataclass(frozen=True, slots=True)
class Group:
    """One scheduler, the number of its workers, and the rate that it gets."""

    workers: int
    arrivals_per_s: float
    """The group's share r_i of the requests per second."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Division of a cluster into groups, and what it wastes."""

    groups: tuple[Group, ...]
    """The groups, the largest first. Their sizes differ by one at most."""
    least_workers: int
    """Lower bound of every N_i, unless there is only one group."""
    most_workers: int
    """Upper bound of every N_i, from r(T_s)."""
    wasted_workers: float
    """Workers that the division wastes on average: half a worker per group; 0 for a single
    group."""

    @property
    def waste_ratio(self) -> float:
        """Share of all workers that dividing the cluster wastes."""
        return self.wasted_workers / sum(group.workers for group in self.groups)


def divide(
    workers: int, arrivals_per_s: float, waste_ratio: float, scheduler_arrivals_per_s: float
) -> GroupLayout:
    """Returns the division of a cluster into the fewest groups that eq. 8 allows.

    Args:
        workers: N_w, the number of workers in the cluster.
        arrivals_per_s: r_a, the requests per second of the whole cluster.
        waste_ratio: e, the largest share of its workers that a group may waste, in (0, 1].
        scheduler_arrivals_per_s: r(T_s), see `rate_within`.

    Raises:
        InvalidInput: A figure is out of its range.
        PlanInfeasible: Groups small enough for their schedulers would waste more than
            `waste_ratio`.
    """
    _check(workers, arrivals_per_s, waste_ratio, scheduler_arrivals_per_s)
    least = math.ceil(_unrounded(1.0 / (2.0 * waste_ratio)))
    most = workers
    if arrivals_per_s > 0:
        allowed = scheduler_arrivals_per_s * workers / arrivals_per_s
        most = min(workers, math.floor(_unrounded(allowed)))
    count = math.ceil(workers / most) if most > 0 else 0
    smallest = workers // count if count else 0
    if count == 0 or (count > 1 and smallest < least):
        raise PlanInfeasible(
            f"a scheduler that takes {scheduler_arrivals_per_s:g} requests/s can lead {most} of"
            f" {workers} workers; groups of fewer than {least} waste more than {waste_ratio:.0%}"
        )
    larger = workers - smallest * count
    sizes = [smallest + 1] * larger + [smallest] * (count - larger)
    groups = tuple(Group(size, arrivals_per_s * size / workers) for size in sizes)
    return GroupLayout(groups, least, most, count / 2 if count > 1 else 0.0)


def rate_within(decision_s: float, latency_s: float) -> float:
    """Returns r(T_s): the rate at which a scheduler decides within `latency_s` on average.

    Decisions take `decision_s` each, one at a time, and requests arrive at random (M/D/1): latency
    = s + rho * s / (2 * (1 - rho)), solved for the rate rho / s. The rate is 0 if a single decision
    takes longer than that.

    Raises:
        InvalidInput: A time is not positive and finite.
    """
    if not (0 < decision_s < math.inf and 0 < latency_s < math.inf):
        raise InvalidInput("latency", "times must be positive and finite")
    waiting_s = latency_s - decision_s
    if waiting_s <= 0:
        return 0.0
    return 2.0 * waiting_s / (decision_s * (2.0 * latency_s - decision_s))


def _check(workers: int, arrivals_per_s: float, waste_ratio: float, rate: float) -> None:
    if workers < 1:
        raise InvalidInput("workers", "must be 1 or more")
    if not 0 <= arrivals_per_s < math.inf:
        raise InvalidInput("arrivals_per_s", "must be 0 or more, and finite")
    if not 0 < waste_ratio <= 1:
        raise InvalidInput("waste_ratio", "must be above 0 and at most 1")
    if not rate > 0:
        raise InvalidInput("scheduler_arrivals_per_s", "must be above 0")


def _unrounded(value: float) -> float:
    """Returns a value, or the nearest integer if only rounding error separates them."""
    nearest = round(value) if math.isfinite(value) else value
    return nearest if math.isclose(value, nearest, rel_tol=1e-12) else value
