"""Refit of a line from sums, with forgetting and a prior: recursive normal equations.

Eq. 2 and 3 are linear, so the sum of n steps is a valid row: the sum of their times y against the
sums of their regressors x. The noise of a step is in proportion to its time. With f0 = prior . x as
that time, n steps have the variance n * (s * f0 / n)^2 = s^2 f0^2 / n, so the row has weight n /
f0^2. (Weights by the measured y would favour steps that happened to be fast.)

    G <- d G + n x x' / f0^2        m <- d m + n x y / f0^2        d = exp(-n / memory)

The solution is by non-negative least squares on (G + P, m + p), where P and p are those of the
prior: the line measured when the partition was loaded, counted as some steps at a few typical
loads. The prior is not forgotten, so if all reports are of one load the other directions stay as
measured. A report of more than `surprise` times the prediction, such as a pause of the machine,
counts as `surprise` times the prediction only. A lasting change is still followed, report by
report. One update is a few operations on matrices of three by three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.latency.intervals import PredictionInterval, around
from catenary_scheduler.planning.latency.nnls import Matrix, Vector, solve_nonnegative

_LEAST_OBSERVED = 1.0
"""Least number of steps from which a spread is computed."""


@dataclass(frozen=True, slots=True)
class RefitPolicy:
    """Parameters that determine how fast a line follows reports.

    Attributes:
        memory_steps: Number of steps after which an observation counts 1 / e; 0 if nothing is
            forgotten.
        prior_steps: Number of steps as which the prior counts, with all of its points together.
        surprise: Factor by which a report may differ from its prediction; beyond it, it counts as
            that much. 0 for no limit.
    """

    memory_steps: float = 600.0
    prior_steps: float = 20.0
    surprise: float = 4.0


class LineRefit:
    """A line with its prior, and the sums of what was observed."""

    def __init__(
        self,
        prior: Sequence[float],
        points: Sequence[Sequence[float]],
        policy: RefitPolicy | None = None,
    ) -> None:
        """Starts with the prior alone.

        Args:
            prior: Coefficients measured at load; none is negative.
            points: Regressors of typical single steps, at which the prior is trusted.
            policy: Weight of the prior, and the speed of forgetting.
        """
        self._policy = policy or RefitPolicy()
        self.prior: Vector = np.asarray(prior, np.float64)
        count = len(self.prior)
        self._prior_gram: Matrix = np.zeros((count, count))
        self._prior_moment: Vector = np.zeros(count)
        steps = self._policy.prior_steps / max(1, len(points))
        for point in points:
            x = np.asarray(point, np.float64)
            time = float(self.prior @ x)
            if time > 0.0:
                self._prior_gram += steps * np.outer(x, x) / time**2
                self._prior_moment += steps * x / time
        self._gram: Matrix = np.zeros((count, count))
        self._moment: Vector = np.zeros(count)
        self._squares = 0.0
        self.steps = 0.0
        """Number of steps that were observed, with forgotten ones counted less."""
        self._reports = 0.0
        """Number of reports behind these steps, decayed likewise. Steps of one report are not
        independent."""
        self.coefficients: Vector = self.prior.copy()
        """Present fit; no coefficient is negative."""

    def add(self, steps: int, regressors: Sequence[float], total_ns: float) -> None:
        """Adds the sums over some steps. Steps that took no time are ignored.

        Args:
            steps: Number of steps.
            regressors: Sums of the regressors over the steps.
            total_ns: Sum of the steps' times in nanoseconds.
        """
        if steps < 1 or not total_ns > 0.0:
            return
        memory = self._policy.memory_steps
        kept = float(np.exp(-steps / memory)) if memory > 0.0 else 1.0
        x = np.asarray(regressors, np.float64)
        predicted = float(self.coefficients @ x)
        time = self._believed(total_ns, predicted)
        scale = float(self.prior @ x) or time
        self._gram = kept * self._gram + steps * np.outer(x, x) / scale**2
        self._moment = kept * self._moment + steps * x * (time / scale**2)
        self.steps = kept * self.steps + steps
        self._reports = kept * self._reports + 1.0
        if predicted > 0.0:
            self._squares = kept * self._squares + steps * (time / predicted - 1.0) ** 2
        self.coefficients = solve_nonnegative(
            self._gram + self._prior_gram, self._moment + self._prior_moment
        )

    def _believed(self, total_ns: float, predicted: float) -> float:
        surprise = self._policy.surprise
        if not surprise or predicted <= 0.0:
            return total_ns
        return min(max(total_ns, predicted / surprise), predicted * surprise)

    def predict(self, regressors: Sequence[float]) -> float:
        """Returns the nanoseconds of steps with these summed regressors."""
        return float(self.coefficients @ np.asarray(regressors, np.float64))

    @property
    def spread(self) -> float:
        """Relative standard deviation of one step, as if steps were independent.

        Returns 0 if it is unknown.
        """
        if self.steps < _LEAST_OBSERVED:
            return 0.0
        return float(np.sqrt(self._squares / max(1.0, self._degrees)))

    @property
    def _degrees(self) -> float:
        return self._reports - float(np.count_nonzero(self.coefficients))

    def interval(self, regressors: Sequence[float], share: float = 0.9) -> PredictionInterval:
        """Returns an interval that should contain `share` of single steps at `regressors`."""
        predicted = self.predict(regressors)
        x = np.asarray(regressors, np.float64)
        scale = float(self.prior @ x) or max(predicted, 1e-300)
        inverse = np.linalg.pinv(self._gram + self._prior_gram, hermitian=True)
        leverage = float(x @ inverse @ x) / scale**2
        return around(predicted, self.spread, leverage, self._degrees, share)
