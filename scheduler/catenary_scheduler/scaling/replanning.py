"""Detection of a load that has moved so far from the planned one that a new plan is due.

A plan maximises the least throughput / weight over the models, so it is made for *shares* of the
load. Its distance from the present load is the share that moved from one model to another (half the
sum of absolute differences). Three rules keep noise from reconfiguring the cluster. Shares are
trusted only when enough rows support them. A distance must last, and it ends only below a lower
threshold (hysteresis). Plans are some time apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from catenary_scheduler.scaling.rates import ArrivalRates
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds

Shares = Mapping[ModelKey, float]
"""Share of each model in the load; the shares add up to 1."""

_LET_GO = 0.6
"""A change ends when the distance falls below this part of the threshold."""


@dataclass(frozen=True, slots=True)
class ReplanPolicy:
    """Thresholds above which load alone is a reason to plan anew."""

    moved_share: float = 0.15
    """Least share of the load that must have moved between models before a new plan is due."""
    lasting_ns: Nanoseconds = 10 * NANOSECONDS_PER_SECOND
    """Least time for which the distance must have lasted, in nanoseconds."""
    interval_ns: Nanoseconds = 30 * NANOSECONDS_PER_SECOND
    """Least time between two plans that the load causes, in nanoseconds."""
    every_ns: Nanoseconds = 0
    """Time after which a plan is made anew in any case, in nanoseconds; 0 for never."""
    time_constant_ns: Nanoseconds = 30 * NANOSECONDS_PER_SECOND
    """Time constant of the arrival rates, in nanoseconds."""
    least_rows: float = 100.0
    """Least number of rows within the time constant from which shares are derived."""
    least_share: float = 0.05
    """Share that every model is planned for at least, because it may be called at any moment."""


class LoadReplanning:
    """A follower of the load that says when to plan anew.

    Feed `rates` with what arrives, and tell it what was `planned`; ask `decide` from time to time.

    Attributes:
        policy: The thresholds.
        rates: The recent rates of arrivals.
    """

    def __init__(self, policy: ReplanPolicy) -> None:
        self.policy = policy
        self.rates = ArrivalRates(policy.time_constant_ns)
        self._planned: dict[ModelKey, float] = {}
        self._planned_ns: Nanoseconds | None = None
        self._moved_ns: Nanoseconds | None = None
        """Moment since which the distance has been too large; None while it is not."""

    def planned(self, shares: Shares, now: Nanoseconds) -> None:
        """Records that a plan was made for these shares.

        Pass no shares if the plan does not depend on them.
        """
        self._planned = dict(shares)
        self._planned_ns = now
        self._moved_ns = None

    def shares(self, models: Iterable[ModelKey], now: Nanoseconds) -> dict[ModelKey, float]:
        """Returns the shares to plan for: the recent ones, if enough rows support them.

        Otherwise they are the shares that were planned for last.

        A model about which nothing is known gets the mean share of the others. Every share is at
        least `least_share`.
        """
        wanted = list(dict.fromkeys(models))
        if not wanted:
            return {}
        seen = {model: self.rates.observed_rows(model, now) for model in wanted}
        if sum(seen.values()) >= self.policy.least_rows:
            return self._with_floor(seen)
        known = [self._planned[model] for model in wanted if model in self._planned]
        usual = sum(known) / len(known) if known else 1.0
        return self._with_floor({model: self._planned.get(model, usual) for model in wanted})

    def decide(self, now: Nanoseconds) -> str:
        """Returns in words why a new plan is due now; empty if none is due."""
        policy = self.policy
        if self._planned_ns is None:
            return ""
        if policy.every_ns and now - self._planned_ns >= policy.every_ns:
            return "the schedule says so"
        if not self._planned:
            return ""
        present = self.shares(self._planned, now)
        moved = distance(self._planned, present)
        if moved < policy.moved_share * _LET_GO:
            self._moved_ns = None
        elif moved >= policy.moved_share and self._moved_ns is None:
            self._moved_ns = now
        lasting = self._moved_ns is not None and now - self._moved_ns >= policy.lasting_ns
        if not lasting or now - self._planned_ns < policy.interval_ns:
            return ""
        return f"{moved:.0%} of the load moved between models: {_in_words(present)}"

    def _with_floor(self, amounts: Mapping[ModelKey, float]) -> dict[ModelKey, float]:
        total = sum(amounts.values())
        floor = min(self.policy.least_share, 1.0 / len(amounts))
        raised = {
            model: max(floor, amount / total if total > 0 else floor)
            for model, amount in amounts.items()
        }
        whole = sum(raised.values())
        return {model: share / whole for model, share in raised.items()}


def distance(one: Shares, other: Shares) -> float:
    """Returns the total variation distance: the share of the load that has moved, 0 to 1."""
    models = {*one, *other}
    return sum(abs(one.get(model, 0.0) - other.get(model, 0.0)) for model in models) / 2


def objective_at(throughput_rps: Mapping[ModelKey, float], shares: Shares) -> float:
    """Returns the largest total load, in rows per second, that models can take at these shares."""
    return min(
        (throughput_rps.get(model, 0.0) / share for model, share in shares.items() if share > 0),
        default=0.0,
    )


def _in_words(shares: Shares) -> str:
    return ", ".join(f"{model} {share:.0%}" for model, share in sorted(shares.items()))
