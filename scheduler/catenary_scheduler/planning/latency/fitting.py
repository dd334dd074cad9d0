"""Fits of latency lines: from samples of a worker's profile to the coefficients of eq. 1-3.

Samples count by their relative error, as the paper judges its models. Weights are 1 / f^2, where f
is the prediction of the previous fit (at first the measurement), so that the relative residual of a
step of 5 ms counts as much as that of one of 500 ms.
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
"""Share of the squared relative error without a floor, below which a floor must bring it."""
_EXACT = 1e-8
"""Squared relative error below which a fit counts as exact."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One pass over prompts, with their total tokens and its nanoseconds."""

    tokens: int
    ns: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One decode step, with its sessions, their total context and its nanoseconds."""

    sessions: int
    context_tokens: int
    ns: float


@dataclass(frozen=True, slots=True)
class CacheSample:
    """Amount of cache that one session of `tokens` tokens takes."""

    tokens: int
    amount: float


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """Coefficients of a line, and the data for prediction intervals.

    Attributes:
        coefficients: float64 [n], none negative.
        floor: Least prediction.
        spread: Standard deviation of measured / predicted - 1.
        degrees: Number of samples minus the number of coefficients in use.
        inverse: float64 [n, n], (X'WX)^-1 over the coefficients in use, 0 elsewhere.
    """

    coefficients: Vector
    floor: float
    spread: float
    degrees: int
    inverse: Matrix

    def predict(self, row: Sequence[float]) -> float:
        return max(self.floor, float(self.coefficients @ np.asarray(row, np.float64)))

    def interval(self, row: Sequence[float], share: float = 0.9) -> PredictionInterval:
        """Returns an interval that should contain `share` of the measurements at `row`."""
        x, predicted = np.asarray(row, np.float64), self.predict(row)
        leverage = float(x @ self.inverse @ x) / max(predicted, 1e-300) ** 2
        return around(predicted, self.spread, leverage, self.degrees, share)


def fit_prefill(samples: Sequence[PrefillSample]) -> LatencyFit:
    """Returns the fit of (k1, c1) of eq. 2, with the flat floor of short prompts.

    Below some length a prompt takes as long as reading the weights, whatever its length. The
    shortest samples are therefore averaged to a floor if that lowers the error notably, and the
    line is fitted to the others. The length that divides them is found by trying every length.

    Raises:
        InvalidInput: There are no samples, or one is not positive.
    """
    ordered = sorted(samples, key=lambda sample: sample.tokens)
    rows = np.array([[each.tokens, 1.0] for each in ordered], np.float64).reshape(-1, 2)
    times = np.array([each.ns for each in ordered], np.float64)
    best = _fit(rows, times)
    least = _squares(best, rows, times) * _WORTH_A_FLOOR - _EXACT * len(times)
    lengths = sorted({each.tokens for each in ordered})
    for length in lengths[1:-1]:  # the line needs at least two lengths
        flat = int(np.searchsorted(rows[:, 0], length))
        # This mean minimises the relative error, with weights 1 / t^2.
        floor = float(np.sum(1.0 / times[:flat]) / np.sum(1.0 / times[:flat] ** 2))
        candidate = _fit(rows[flat:], times[flat:], floor)
        squares = _squares(candidate, rows, times)
        if squares < least:
            best, least = candidate, squares
    return _with_spread(best, rows, times)


def fit_decode(samples: Sequence[DecodeSample]) -> tuple[LatencyFit, float]:
    """Returns (k2, c2, c3) of eq. 3, and t1: the mean of the steps of one session, 0 without any.

    Raises:
        InvalidInput: No sample has more than one session, or one is not positive.
    """
    shared = [each for each in samples if each.sessions > 1]
    lone = [each.ns for each in samples if each.sessions == 1]
    rows = np.array([[each.context_tokens, each.sessions, 1.0] for each in shared], np.float64)
    fit = _fit(rows.reshape(-1, 3), np.array([each.ns for each in shared], np.float64))
    return fit, sum(lone) / len(lone) if lone else 0.0


def fit_cache(samples: Sequence[CacheSample]) -> LatencyFit:
    """Returns the fit of (h, j) of eq. 1.

    Raises:
        InvalidInput: There are no samples, or one is not positive.
    """
    rows = np.array([[each.tokens, 1.0] for each in samples], np.float64).reshape(-1, 2)
    return _fit(rows, np.array([each.amount for each in samples], np.float64))


def lines_of(
    prefill: LatencyFit,
    decode: tuple[LatencyFit, float],
    cache: LatencyFit | None = None,
    chunk_tokens: int = 0,
) -> LatencyLines:
    """Returns the lines of a worker that was profiled as a whole."""
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
    for _ in range(_ROUNDS):  # fast outliers must not weigh more than slow ones
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
    """Returns the sum of the squared relative errors of a fit."""
    predicted = np.maximum(rows @ fit.coefficients, max(fit.floor, 1e-300))
    return float(np.sum((targets / predicted - 1.0) ** 2))
