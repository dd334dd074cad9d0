"""Lines from a profile: samples of a worker in, coefficients of eq. 1-3 out.

Samples count by their relative error, as the paper judges its models: weights are 1 / f^2, f being
the prediction of the fit before (at first the measurement), so that the residual of a step of 5 ms
is worth as much as that of one of 500 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.latency.intervals import PredictionInterval, around
from catenary_scheduler.planning.latency.nnls import (
    Matrix,
    Vector,
    normal_equations,
    solve_nonnegative,
)
from catenary_services.domain.latency import LatencyLines
from catenary_services.errors import InvalidInput

_ROUNDS = 3
_LEAST_EXPECTED = 0.1
_WORTH_A_FLOOR = 0.9
"""A floor must bring the squared relative error below this share of what it was without."""
_EXACT = 1e-8
"""A smaller squared relative error is none."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One pass over prompts of so many tokens in all."""

    tokens: int
    ns: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One step of so many sessions with so many tokens of context in all."""

    sessions: int
    context_tokens: int
    ns: float


@dataclass(frozen=True, slots=True)
class CacheSample:
    """What the cache of one session of so many tokens takes."""

    tokens: int
    amount: float


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """Coefficients, and what is needed to say how far off they are.

    Attributes:
        coefficients: float64 [n], none negative.
        floor: What is predicted at least.
        spread: Standard deviation of measured / predicted - 1.
        degrees: Samples less coefficients in use.
        inverse: float64 [n, n], (X'WX)^-1 over the coefficients in use, 0 elsewhere.
    """

    coefficients: Vector
    floor: float
    spread: float
    degrees: int
    inverse: Matrix

    def predict(self, row: Sequence[float]) -> float:
        """Returns the prediction for regressors `row`."""
        return max(self.floor, float(self.coefficients @ np.asarray(row, np.float64)))

    def interval(self, row: Sequence[float], share: float = 0.9) -> PredictionInterval:
        """Returns what `share` of measurements at `row` should lie between."""
        x, predicted = np.asarray(row, np.float64), self.predict(row)
        leverage = float(x @ self.inverse @ x) / max(predicted, 1e-300) ** 2
        return around(predicted, self.spread, leverage, self.degrees, share)


def fit_prefill(samples: Sequence[PrefillSample]) -> LatencyFit:
    """Returns (k1, c1) of eq. 2 and the flat floor of short prompts.

    Below some length a prompt takes what reading the weights takes, whatever its length: the
    shortest samples are averaged to a floor if that lowers the error notably, and the line is
    fitted to the others. What was cut off is decided by trying every length.

    Raises:
        InvalidInput: If there are no samples.
    """
    ordered = sorted(samples, key=lambda sample: sample.tokens)
    rows = np.array([[each.tokens, 1.0] for each in ordered], np.float64).reshape(-1, 2)
    times = np.array([each.ns for each in ordered], np.float64)
    best = _fit(rows, times)
    least = _squares(best, rows, times) * _WORTH_A_FLOOR - _EXACT * len(times)
    lengths = sorted({each.tokens for each in ordered})
    for length in lengths[1:-1]:  # at least two lengths are left for the line
        flat = int(np.searchsorted(rows[:, 0], length))
        # The mean that minimises the relative error, weights 1 / t^2.
        floor = float(np.sum(1.0 / times[:flat]) / np.sum(1.0 / times[:flat] ** 2))
        candidate = _fit(rows[flat:], times[flat:], floor)
        squares = _squares(candidate, rows, times)
        if squares < least:
            best, least = candidate, squares
    return _with_spread(best, rows, times)


def fit_decode(samples: Sequence[DecodeSample]) -> tuple[LatencyFit, float]:
    """Returns (k2, c2, c3) of eq. 3, and t1: the mean of the steps of one session, 0 without any.

    Raises:
        InvalidInput: If there is no sample of more than one session.
    """
    shared = [each for each in samples if each.sessions > 1]
    lone = [each.ns for each in samples if each.sessions == 1]
    rows = np.array([[each.context_tokens, each.sessions, 1.0] for each in shared], np.float64)
    fit = _fit(rows.reshape(-1, 3), np.array([each.ns for each in shared], np.float64))
    return fit, sum(lone) / len(lone) if lone else 0.0


def fit_cache(samples: Sequence[CacheSample]) -> LatencyFit:
    """Returns (h, j) of eq. 1.

    Raises:
        InvalidInput: If there are no samples.
    """
    rows = np.array([[each.tokens, 1.0] for each in samples], np.float64).reshape(-1, 2)
    return _fit(rows, np.array([each.amount for each in samples], np.float64))


def lines_of(
    prefill: LatencyFit,
    decode: tuple[LatencyFit, float],
    cache: LatencyFit | None = None,
    chunk_tokens: int = 0,
) -> LatencyLines:
    """Returns the lines of a worker that was profiled whole."""
    shared, lone = decode
    return LatencyLines(
        prefill_token_ns=float(prefill.coefficients[0]),
        prefill_ns=float(prefill.coefficients[1]),
        decode_context_token_ns=float(shared.coefficients[0]),
        decode_session_ns=float(shared.coefficients[1]),
        decode_ns=float(shared.coefficients[2]),
        decode_lone_ns=lone,
        prefill_floor_ns=prefill.floor,
        prefill_chunk_tokens=chunk_tokens,
        cache_token=1.0 if cache is None else float(cache.coefficients[0]),
        cache_session=0.0 if cache is None else float(cache.coefficients[1]),
    )


def _fit(rows: Matrix, targets: Vector, floor: float = 0.0) -> LatencyFit:
    if not len(targets):
        raise InvalidInput("samples", "a line cannot be fitted to nothing")
    if not np.all(targets > 0.0):
        raise InvalidInput("samples", "every measurement must be positive")
    expected = targets
    for _ in range(_ROUNDS):  # what happened to be fast must not weigh more than what was slow
        gram, moment, _ = normal_equations(rows, targets, expected**-2.0)
        coefficients = solve_nonnegative(gram, moment)
        expected = np.maximum(rows @ coefficients, _LEAST_EXPECTED * targets)
    used = np.flatnonzero(coefficients > 0.0)
    inverse = np.zeros_like(gram)
    inverse[np.ix_(used, used)] = np.linalg.pinv(gram[np.ix_(used, used)], hermitian=True)
    fit = LatencyFit(coefficients, floor, 0.0, len(targets) - len(used) - (floor > 0.0), inverse)
    return _with_spread(fit, rows, targets)


def _with_spread(fit: LatencyFit, rows: Matrix, targets: Vector) -> LatencyFit:
    used = int(np.count_nonzero(fit.coefficients)) + (fit.floor > 0.0)
    degrees = len(targets) - used
    spread = float(np.sqrt(_squares(fit, rows, targets) / max(1, degrees)))
    return LatencyFit(fit.coefficients, fit.floor, spread, degrees, fit.inverse)


def _squares(fit: LatencyFit, rows: Matrix, targets: Vector) -> float:
    """Returns the sum of squared relative errors."""
    predicted = np.maximum(rows @ fit.coefficients, max(fit.floor, 1e-300))
    return float(np.sum((targets / predicted - 1.0) ** 2))
