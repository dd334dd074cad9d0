"""Improvement of a plan until its bound or its time is reached, one target at a time.

For a target every model must reach a rate, and one that is out of reach is mostly recognised at
once: if even the cheapest shares cost more than the cluster has, at whatever prices of GPUs. If
fractions of shares fit, whole ones are sought among those that were found on the way. Targets are
chosen between the best plan and the bound, and so both approach each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.solving.division import (
    DivisionInParts,
    divide,
    divide_in_fractions,
    round_division,
)
from catenary_scheduler.planning.pooled.solving.milp import MilpTask
from catenary_scheduler.planning.pooled.solving.shares import Gpus, ModelShare, cheapest_shares

_ROUNDS = 12
"""Number of times that prices are corrected for one target."""
_PART_OF_TIME = 0.25
"""Part of the time that is left which the search for whole shares may take at once."""
_CAREFUL, _VERY_CAREFUL = 2, 8
"""Efforts for the bound that is reported."""
_ENOUGH = 1e-7
_FAR = 1.5
"""Multiple of the cluster's GPUs that is assumed where a model has no share."""
_CLOSE = 5e-5
"""Relative difference of targets that are not told apart any more."""
_NARROW = 1e-3
"""The same before whole shares have been sought."""
_SEED = 1
_MOST_VARIATIONS, _PRICES_AT_ONCE = 40, 4
_PARTS_OF_GAP = (0.3, 0.1, 0.03, 0.01)
_FIRST_PART = 0.6
"""Place of the first target between the first plan and the bound."""
_FIRST_STEP = 5e-3
"""Relative step down from a target for which no plan of single pipelines was found."""


class _Answer(NamedTuple):
    """The answer whether a plan of a target rate exists, as far as it was found."""

    division: DivisionInParts | None
    """A division in fractions that reaches it."""
    needed: float
    """Number of GPUs it takes, as a multiple of the cluster's."""
    impossible: bool = False
    """True if it is proven that no plan reaches it."""


@dataclass(slots=True)
class PlanBounds:
    """The best plan that is known, and the target that no plan can pass."""

    least: float
    """Target of the best plan; 0 if there is none."""
    most: float
    """Target that no plan exceeds."""
    shares: Sequence[ModelShare] | None
    """Shares of the best plan; None if it is the one that the search began with."""

    def gap(self) -> float:
        return (self.most - self.least) / max(self.least, 1e-12)


class TargetSearch:
    """A search for the largest target, every model at weight x target."""

    def __init__(self, task: MilpTask, prices: Floats, seconds_left: Callable[[], float]) -> None:
        self._task = task
        self._counts = np.array([gpu.count for gpu in task.problem.classes], dtype=np.int64)
        self._prices = self._scaled(prices)
        self._seconds_left = seconds_left
        self._known: list[dict[Gpus, ModelShare]] = [{} for _ in task.columns]

    def know(self, shares: Sequence[ModelShare]) -> None:
        """Adds one share of each model to those that are known."""
        for known, share in zip(self._known, shares, strict=True):
            _keep(known, share)

    def improve(self, bounds: PlanBounds, gap: float) -> None:
        """Brings plan and bound together until they differ by the gap, or time is up."""
        self._begin(bounds, gap)
        reached = bounds.least  # fractions of shares reach it
        ceiling = bounds.most  # and nothing from here on, proven or not
        target = reached + _FIRST_PART * (ceiling - reached)
        while self._seconds_left() > 0 and bounds.gap() > gap:
            if ceiling - reached <= _NARROW * ceiling:
                self._prove(bounds, ceiling, _CAREFUL)
                self._find_below(bounds, ceiling)
                self._prove(bounds, ceiling, _VERY_CAREFUL)
                self._vary(bounds, gap)
                return
            answer = self._ask(target)
            if answer.division is not None:
                self._find(bounds, target, answer.division)
                reached = max(target, bounds.least)
                ceiling = max(ceiling, reached)
            else:
                ceiling = target
                if answer.impossible:
                    bounds.most = max(target, bounds.least)
            target = _between(reached, ceiling, target / answer.needed)

    def can_be_reached(self, bounds: PlanBounds) -> bool:
        """Looks for a plan at a target next to nothing. False if there is none at all."""
        target = bounds.most * 1e-9
        answer = self._ask(target)
        if answer.division is not None:
            self._find(bounds, target, answer.division)
        return not answer.impossible

    def _begin(self, bounds: PlanBounds, gap: float) -> None:
        """Seeks a better plan of one pipeline for each model, which takes little time."""
        target = bounds.most
        while self._seconds_left() > 0 and target > bounds.least * (1 + gap):
            answer = self._ask(target, effort=0)
            if answer.division is not None and self._find(bounds, target, answer.division):
                return
            if answer.impossible:
                bounds.most = max(target, bounds.least)
            target /= max(answer.needed, 1.0) * (1 + _FIRST_STEP)

    def _find_below(self, bounds: PlanBounds, most: float) -> None:
        """Seeks whole shares below a target that fractions of shares just do not reach."""
        target = (bounds.least + most) / 2
        while self._seconds_left() > 0 and most - bounds.least > _CLOSE * most:
            answer = self._ask(target)
            if answer.division is None or not self._find(bounds, target, answer.division):
                most = target
            target = (bounds.least + most) / 2

    def _vary(self, bounds: PlanBounds, gap: float) -> None:
        """Seeks whole shares among those that are cheap at prices near the last ones, too."""
        chance = np.random.default_rng(_SEED)
        prices = self._prices
        for turn in range(_MOST_VARIATIONS):
            part = _PARTS_OF_GAP[turn % len(_PARTS_OF_GAP)]
            target = bounds.least + part * (bounds.most - bounds.least)
            for _ in range(_PRICES_AT_ONCE):
                self._prices = self._scaled(prices * chance.uniform(0.5, 2.0, len(prices)))
                if bounds.gap() <= gap or self._price(target) is None:
                    return
            division = divide_in_fractions(self._counts, self._reaching(target))
            if division.used <= 1 + _ENOUGH:
                self._find(bounds, target, division)

    def _prove(self, bounds: PlanBounds, target: float, effort: int) -> None:
        """Lowers the bound as far as the last prices prove it, from a target upwards."""
        for _ in range(_ROUNDS):
            cost = self._price(target, effort)
            if cost is None or target >= bounds.most:
                return
            if cost > 1 + _ENOUGH:
                bounds.most = max(target, bounds.least)
                return
            target *= 1 + 1.25 * max(1 - cost, 0.0) + 2 * _CLOSE

    def _find(self, bounds: PlanBounds, target: float, division: DivisionInParts) -> bool:
        """Seeks whole shares that reach the target. True if the plan got better."""
        seconds = max(self._seconds_left() * _PART_OF_TIME, 0.05)
        some = self._reaching(target)
        chosen = round_division(self._counts, some, division)
        if chosen is None:
            chosen = divide(self._counts, some, division.prices, seconds)
        if chosen is None:
            return False
        value = min(
            share.rate / model.weight
            for share, model in zip(chosen, self._task.problem.models, strict=True)
        )
        if value <= bounds.least:
            return False
        bounds.least, bounds.shares = value, chosen
        bounds.most = max(bounds.most, value)
        return True

    def _ask(self, target: float, effort: int = 1) -> _Answer:
        """Returns whether fractions of shares reach the target."""
        least, needed = 0.0, np.inf
        for _ in range(_ROUNDS):
            cost = self._price(target, effort)
            if cost is None:
                break
            least = max(least, cost)
            if least > 1 + _ENOUGH:
                return _Answer(None, least, impossible=True)
            some = self._reaching(target)
            if not all(some):
                return _Answer(None, _FAR)
            division = divide_in_fractions(self._counts, some)
            self._prices = self._scaled(division.prices)
            saved, needed = needed - division.used, division.used
            if needed <= 1 + _ENOUGH:
                return _Answer(division, needed)
            if saved < (needed - 1) / 2:  # better prices will not do
                break
        return _Answer(None, needed if needed < np.inf else 1.0)

    def _price(self, target: float, effort: int = 1) -> float | None:
        """Returns what the models' cheapest shares cost together, a cluster being 1.

        None if time was up before.
        """
        cost = 0.0
        for known, columns, model in zip(
            self._known, self._task.columns, self._task.problem.models, strict=True
        ):
            if self._seconds_left() <= 0:
                return None
            rate = model.weight * target
            found = cheapest_shares(columns, self._counts, self._prices, rate, effort)
            cost += found.least_cost
            for share in found.shares:
                _keep(known, share)
        return cost

    def _reaching(self, target: float) -> list[list[ModelShare]]:
        return [
            [share for share in known.values() if share.rate >= model.weight * target * (1 - 1e-9)]
            for known, model in zip(self._known, self._task.problem.models, strict=True)
        ]

    def _scaled(self, prices: Floats) -> Floats:
        """Returns prices at which the whole cluster costs 1, none of them quite 0."""
        total = float(prices @ self._counts)
        even = 1.0 / max(int(self._counts.sum()), 1)
        if not total > 0:
            return np.full(len(prices), even)
        prices = prices / total + 1e-6 * even
        scaled: Floats = prices / float(prices @ self._counts)
        return scaled


def _keep(known: dict[Gpus, ModelShare], share: ModelShare) -> None:
    if share.gpus not in known or known[share.gpus].rate < share.rate:
        known[share.gpus] = share


def _between(low: float, high: float, guess: float) -> float:
    """Returns a target between two, near the guess, but not at either end."""
    width = high - low
    return min(max(guess, low + 0.1 * width), high - 0.1 * width)
