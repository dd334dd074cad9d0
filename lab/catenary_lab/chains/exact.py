"""Exact mean response times to test bounds by: M/M/C for one chain, Appendix A.3 for two."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import numpy as np

from catenary_scheduler.planning.chains.bounds import birth_death_occupancy
from catenary_services.errors import InvalidInput


def one_chain_response_s(capacity: int, rate_per_s: float, arrivals_per_s: float) -> float:
    """Returns the mean response time of M/M/C: one chain with `capacity` job servers.

    Raises:
        InvalidInput: The load is 1 or more.
    """
    total = capacity * rate_per_s
    if arrivals_per_s >= total:
        raise InvalidInput("arrivals_per_s", "must be below the total service rate")
    deaths = rate_per_s * np.arange(1, capacity + 1, dtype=np.float64)
    return birth_death_occupancy(deaths, arrivals_per_s, total) / arrivals_per_s


def two_chains_response_s(
    capacities: tuple[int, int],
    rates_per_s: tuple[Fraction, Fraction],
    arrivals_per_s: Fraction,
) -> Fraction:
    """Returns the mean response time of two chains under JFFC (Appendix A.3), without rounding.

    Args:
        capacities: The capacities c_1 and c_2.
        rates_per_s: The rates mu_1 >= mu_2.
        arrivals_per_s: The arrival rate lambda.

    Raises:
        InvalidInput: The load is 1 or more, or the second chain is the faster one.
    """
    (c1, c2), (mu1, mu2), arrivals = capacities, rates_per_s, arrivals_per_s
    total = c1 * mu1 + c2 * mu2
    if arrivals >= total:
        raise InvalidInput("arrivals_per_s", "must be below the total service rate")
    if mu1 < mu2:
        raise InvalidInput("rates_per_s", "the faster chain comes first")
    rows = _alphas(c1, c2, mu1, mu2, arrivals)  # rows[z2][z1], without waiting sessions
    full = rows[c2][c1] * arrivals / (total - arrivals)  # all states with a queue
    waiting_mean = full * (total / (total - arrivals) + c1 + c2)
    everything = sum((sum(row, Fraction(0)) for row in rows), Fraction(0)) + full
    occupancy = waiting_mean + sum(
        (alpha * (z1 + z2) for z2, row in enumerate(rows) for z1, alpha in enumerate(row)),
        Fraction(0),
    )
    return occupancy / everything / arrivals


def _alphas(
    c1: int, c2: int, mu1: Fraction, mu2: Fraction, arrivals: Fraction
) -> list[list[Fraction]]:
    """Returns probabilities of (z1, z2) relative to (0, c2): eq. 46, 48 and 50 to 52."""
    top = [Fraction(1)]
    for z1 in range(1, c1 + 1):
        top.append((c2 * mu2 * sum(top, Fraction(0)) + arrivals * top[-1]) / (z1 * mu1))
    rows = [top]
    for z2 in range(c2 - 1, -1, -1):
        above = rows[-1]
        from_above = [Fraction(0), *accumulate((z2 + 1) * mu2 * alpha for alpha in above)]
        slope, offset = [Fraction(1)], [Fraction(0)]
        for z1 in range(1, c1 + 1):
            out = z1 * mu1
            slope.append((z2 * mu2 * sum(slope, Fraction(0)) + arrivals * slope[-1]) / out)
            offset.append(
                (z2 * mu2 * sum(offset, Fraction(0)) + arrivals * offset[-1] - from_above[z1]) / out
            )
        last = from_above[c1 + 1] / arrivals
        begin = (last - offset[c1]) / slope[c1]
        rows.append([s * begin + o for s, o in zip(slope, offset, strict=True)])
    return rows[::-1]
