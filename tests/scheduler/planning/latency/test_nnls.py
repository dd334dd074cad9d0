"""Non-negative least squares against a brute force over active sets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning.latency.nnls import normal_equations, solve_nonnegative

SETTINGS = settings(max_examples=150, deadline=None)


def brute_force(rows: np.ndarray, targets: np.ndarray) -> float:
    """Returns the least sum of squares over every set of coefficients that may be positive."""
    count = rows.shape[1]
    best = float(targets @ targets)
    for size in range(1, count + 1):
        for kept in combinations(range(count), size):
            part = rows[:, kept]
            found = np.linalg.lstsq(part, targets, rcond=None)[0]
            if np.all(found >= 0):
                best = min(best, float(np.sum((part @ found - targets) ** 2)))
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    seed, count, rows = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 4)), None
    random = np.random.default_rng(seed)
    rows = random.normal(size=(draw(st.integers(1, 8)), count))
    if draw(st.booleans()):  # two columns alike, as when all batches were of one size
        rows[:, 0] = rows[:, -1]
    scales = 10.0 ** np.array(draw(st.lists(st.integers(-5, 5), min_size=count, max_size=count)))
    return rows * scales, random.normal(size=len(rows)) * 10.0 ** draw(st.integers(-3, 9))


@SETTINGS
@given(problems())
def test_no_choice_of_coefficients_fits_better(problem: tuple[np.ndarray, np.ndarray]) -> None:
    rows, targets = problem
    gram, moment, square = normal_equations(rows, targets, np.ones(len(targets)))
    found = solve_nonnegative(gram, moment)
    assert np.all(found >= 0)
    reached = float(np.sum((rows @ found - targets) ** 2))
    assert reached <= brute_force(rows, targets) + 1e-7 * square


def test_a_coefficient_nothing_is_known_of_is_zero() -> None:
    gram = np.array([[4.0, 0.0], [0.0, 0.0]])
    assert solve_nonnegative(gram, np.array([8.0, 0.0])).tolist() == [2.0, 0.0]
    assert solve_nonnegative(np.zeros((3, 3)), np.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_agrees_with_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed")
    random = np.random.default_rng(7)
    for _ in range(50):
        rows, targets = random.normal(size=(6, 3)), random.normal(size=6)
        found = solve_nonnegative(rows.T @ rows, rows.T @ targets)
        assert found == pytest.approx(optimize.nnls(rows, targets)[0], abs=1e-8)
