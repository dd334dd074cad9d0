"""A line refitted from sums, with forgetting and a prior: recursive normal equations.

Eq. 2 and 3 are linear, so the sum of n steps is a valid row: the sum of their times y against the
sums of their regressors x. The noise of a step is in proportion to its time; with f0 = prior . x
for that, n steps have the variance n * (s * f0 / n)^2 = s^2 f0^2 / n, so the row counts with weight
n / f0^2. (Weights by the measured y would favour what happened to be fast.)

    G <- d G + n x x' / f0^2        m <- d m + n x y / f0^2        d = exp(-n / memory)

Solved by non-negative least squares on (G + P, m + p), with P, p of the prior: the line measured
when the partition was loaded, taken for so many steps at a few typical loads. The prior is not
forgotten; where reports are all of one load the other directions stay as they were measured. A
report of more than `surprise` times what is predicted, a pause of the machine, counts as so many
times only: what lasts is followed all the same, report by report. One update is a few operations on
matrices of three by three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.latency.intervals import PredictionInterval, around
from catenary_scheduler.planning.latency.nnls import Matrix, Vector, solve_nonnegative

_LEAST_OBSERVED = 1.0
"""Steps; with less behind it the spread is not known."""


@dataclass(frozen=True, slots=True)
class RefitPolicy:
    """How fast a line follows what is reported.

    Attributes:
        memory_steps: Steps after which an observation counts 1 / e; 0: nothing is forgotten.
        prior_steps: Steps the prior counts for, all of its points together.
        surprise: A report off by more than this factor counts as off by it; 0: as it is.
    """

    memory_steps: float = 600.0
    prior_steps: float = 20.0
    surprise: float = 4.0


class LineRefit:
    """One line, and what was observed of it."""

    def __init__(
        self,
        prior: Sequence[float],
        points: Sequence[Sequence[float]],
        policy: RefitPolicy | None = None,
    ) -> None:
        """Begins with the prior alone.

        Args:
            prior: Coefficients measured at load, not negative.
            points: Regressors of typical single steps, at which the prior is believed.
            policy: Weight of the prior, and how fast to forget.
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
        """Observed and not forgotten yet."""
        self._reports = 0.0
        """Rows behind them: steps of one report are not independent of each other."""
        self.coefficients: Vector = self.prior.copy()
        """The fit as of now; none is negative."""

    def add(self, steps: int, regressors: Sequence[float], total_ns: float) -> None:
        """Takes in the sums over some steps; nothing if they took no time.

        Args:
            steps: How many.
            regressors: Summed over them.
            total_ns: Their times, summed.
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
        """Returns the time of steps with these summed regressors."""
        return float(self.coefficients @ np.asarray(regressors, np.float64))

    @property
    def spread(self) -> float:
        """Standard deviation of one step, relative, as if steps were independent of each other."""
        if self.steps < _LEAST_OBSERVED:
            return 0.0
        return float(np.sqrt(self._squares / max(1.0, self._degrees)))

    @property
    def _degrees(self) -> float:
        return self._reports - float(np.count_nonzero(self.coefficients))

    def interval(self, regressors: Sequence[float], share: float = 0.9) -> PredictionInterval:
        """Returns what `share` of single steps at `regressors` should take."""
        predicted = self.predict(regressors)
        x = np.asarray(regressors, np.float64)
        scale = float(self.prior @ x) or max(predicted, 1e-300)
        inverse = np.linalg.pinv(self._gram + self._prior_gram, hermitian=True)
        leverage = float(x @ inverse @ x) / scale**2
        return around(predicted, self.spread, leverage, self._degrees, share)
