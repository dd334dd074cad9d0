"""Non-negative least squares from the normal equations.

Of the rows only G = X'WX and m = X'Wy are needed, whose size is that of the coefficients. Rows can
therefore be added, forgotten and weighted without being stored. The method is Bro and de Jong, "A
fast non-negativity-constrained least squares algorithm" (J. Chemometrics 1997), i.e. Lawson and
Hanson's active sets on G and m. Coefficients are scaled to a unit diagonal first, because
nanoseconds per token and per step differ by many orders of magnitude.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

_TOLERANCE = 1e-11
"""Tolerance of a gradient, relative to the largest entry of the scaled moment."""
_MOST_TURNS_PER_COEFFICIENT = 10
_SOLVED = 1e-9
"""Tolerance of the equations' residual, relative to the largest entry of the scaled moment."""


def solve_nonnegative(gram: Matrix, moment: Vector) -> Vector:
    """Returns the x >= 0 that minimises x'Gx - 2m'x.

    Args:
        gram: float64 [n, n], symmetric and positive semi-definite. A coefficient without
            observations (a row of zeros) becomes 0.
        moment: float64 [n].

    Returns:
        float64 [n].
    """
    count = len(moment)
    if count == 1:
        return np.maximum(moment / gram[0, 0], 0.0) if gram[0, 0] > 0.0 else np.zeros(1)
    scale = np.sqrt(np.maximum(np.diag(gram), 0.0))
    known = scale > 0.0
    scale = np.where(known, scale, 1.0)
    g, m = gram / np.outer(scale, scale), np.where(known, moment / scale, 0.0)
    if known.all() and (whole := _unconstrained(g, m)) is not None:
        return whole / scale
    x = np.zeros(count)
    passive = np.zeros(count, dtype=bool)
    least = _TOLERANCE * max(1e-300, float(np.max(np.abs(m), initial=0.0)))
    for _ in range(_MOST_TURNS_PER_COEFFICIENT * count):
        gradient = np.where(passive | ~known, -np.inf, m - g @ x)
        entering = int(np.argmax(gradient))
        if gradient[entering] <= least:
            break
        passive[entering] = True
        x = _descend(g, m, x, passive)
    result: Vector = x / scale
    return result


def _unconstrained(g: Matrix, m: Vector) -> Vector | None:
    """Returns the plain least squares solution if it has no negative value.

    It is then the answer. Returns None otherwise.
    """
    try:
        x: Vector = np.asarray(np.linalg.solve(g, m), np.float64)
    except np.linalg.LinAlgError:
        return None
    # A nearly singular system may be "solved" by anything, and is left to the active-set method.
    is_solved = bool(np.max(np.abs(g @ x - m)) <= _SOLVED * np.max(np.abs(m)))
    return x if is_solved and bool(np.min(x) >= 0.0) else None


def _descend(g: Matrix, m: Vector, x: Vector, passive: NDArray[np.bool_]) -> Vector:
    """Moves to the least squares over the passive set.

    Coefficients that would turn negative leave it.
    """
    while True:
        target = np.zeros_like(x)
        inside = np.flatnonzero(passive)
        target[inside] = np.linalg.lstsq(g[np.ix_(inside, inside)], m[inside], rcond=1e-13)[0]
        low = passive & (target <= 0.0)
        if not low.any():
            return target
        candidates = np.flatnonzero(low)
        steps = x[candidates] / np.maximum(x[candidates] - target[candidates], 1e-300)
        step = float(np.min(steps))
        x = x + step * (target - x)
        passive[candidates[steps <= step]] = False
        x = np.where(passive, np.maximum(x, 0.0), 0.0)
        if not passive.any():
            return x


def normal_equations(
    rows: Matrix, targets: Vector, weights: Vector
) -> tuple[Matrix, Vector, float]:
    """Returns X'WX, X'Wy and y'Wy for weighted rows.

    Args:
        rows: float64 [k, n].
        targets: float64 [k].
        weights: float64 [k], not negative.
    """
    weighted = rows * weights[:, None]
    return rows.T @ weighted, weighted.T @ targets, float(weights @ (targets * targets))
