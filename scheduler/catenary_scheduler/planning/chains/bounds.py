"""Bounds on the mean response time under JFFC (Theorem 3.7 of server-chain composition).

The number of sessions in the system is bounded by two birth-death processes: n sessions leave at
most as fast as from the n fastest job servers, and at least as fast as from the n slowest. A job
server is one of the c_k places of a chain. Arrivals are assumed Poisson and sizes exponential. Real
load is burstier, so a trace or a peak rate is the better measure where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from catenary_services.errors import InvalidInput

Rates = npt.NDArray[np.float64]

MOST_STATES = 20_000_000
_FASTER = 2.0
"""Ratio of deaths to arrivals above which every state is at most half as likely as the last one."""
_UNLIKELY = 1_100
"""Number of such states after which a probability is 2^-1100, which is 0 in a double."""


@dataclass(frozen=True, slots=True)
class ResponseBounds:
    """Bounds that Theorem 3.7 gives for a set of chains."""

    load: float
    """Load rho = lambda / nu."""
    occupancy_lower: float
    """Lower bound of the mean number of sessions in the system, served or waiting (eq. 31)."""
    occupancy_upper: float
    """Upper bound of the mean number of sessions in the system (eq. 32)."""
    response_lower_s: float
    """Lower bound of the mean response time, by Little's law (eq. 24). The next field is the upper
    bound."""
    response_upper_s: float


def response_bounds(
    capacities: Sequence[int], rates_per_s: Sequence[float], arrivals_per_s: float
) -> ResponseBounds | None:
    """Returns bounds for chains with capacity c_k and rate mu_k; None if the load is too high.

    Args:
        capacities: Capacity c_k of each chain.
        rates_per_s: Rate mu_k = 1 / T_k of one job server of each chain.
        arrivals_per_s: Arrival rate lambda.
    """
    counts, rates = _arrays(capacities, rates_per_s)
    total = float(counts @ rates)
    if arrivals_per_s >= total:
        return None
    lower = _occupancy(counts, rates, arrivals_per_s, fastest_first=True)
    upper = _occupancy(counts, rates, arrivals_per_s, fastest_first=False)
    return ResponseBounds(
        load=arrivals_per_s / total,
        occupancy_lower=lower,
        occupancy_upper=upper,
        response_lower_s=lower / arrivals_per_s,
        response_upper_s=upper / arrivals_per_s,
    )


def response_bound(
    capacities: Sequence[int],
    rates_per_s: Sequence[float],
    arrivals_per_s: float,
    *,
    upper: bool,
) -> float | None:
    """Returns one of the bounds in seconds, for half the time; None if the load is too high."""
    counts, rates = _arrays(capacities, rates_per_s)
    if arrivals_per_s >= float(counts @ rates):
        return None
    return _occupancy(counts, rates, arrivals_per_s, fastest_first=not upper) / arrivals_per_s


def prefix_bounds(
    capacities: Sequence[int], rates_per_s: Sequence[float], arrivals_per_s: float
) -> tuple[float, float]:
    """Returns an interval in seconds for the lower bound, if only the fastest chains are known.

    With further chains the death rates beyond the known C states lie between that of state C and
    infinity, and occupancy falls with every death rate (proof of Theorem 3.7). Both ends agree once
    state C is hardly ever reached, and then the other chains need not be known.

    Args:
        capacities: Capacities c_k of the chains, the fastest first. Chains that are not given are
            no faster.
        rates_per_s: Rate mu_k of each chain.
        arrivals_per_s: Arrival rate lambda.

    Returns:
        The ends of the interval; the second is infinite while these chains alone are overloaded.
    """
    counts, rates = _arrays(capacities, rates_per_s)
    deaths = _deaths(counts, rates, arrivals_per_s)
    weights = _weights(deaths, arrivals_per_s)
    without_more = float(np.arange(len(weights)) @ weights / weights.sum())
    if arrivals_per_s >= deaths[-1]:
        return without_more / arrivals_per_s, math.inf
    with_queue = _mean(weights, arrivals_per_s / float(deaths[-1]))
    return without_more / arrivals_per_s, with_queue / arrivals_per_s


def _arrays(
    capacities: Sequence[int], rates_per_s: Sequence[float]
) -> tuple[npt.NDArray[np.int64], Rates]:
    return np.asarray(capacities, dtype=np.int64), np.asarray(rates_per_s, dtype=np.float64)


def _occupancy(
    counts: npt.NDArray[np.int64], rates: Rates, arrivals: float, *, fastest_first: bool
) -> float:
    order = np.argsort(-rates if fastest_first else rates, kind="stable")
    return birth_death_occupancy(
        _deaths(counts[order], rates[order], arrivals), arrivals, float(counts @ rates)
    )


def _deaths(counts: npt.NDArray[np.int64], rates: Rates, arrivals: float) -> Rates:
    """Returns the death rates nu_1, nu_2, .. for chains in the order in which they fill up.

    The rate grows by mu_k within chain k, which takes O(C) instead of the double sums (28) and
    (29). States that are too unlikely for a double are left out, so C may be billions.
    """
    full = np.concatenate(([0.0], np.cumsum(counts * rates)))
    begins = np.cumsum(counts) - counts
    enough = int(np.searchsorted(full[1:], _FASTER * arrivals))
    if enough < len(counts):
        state = begins[enough] + (_FASTER * arrivals - full[enough]) / rates[enough]
        counts = np.clip(math.ceil(state) + _UNLIKELY - begins, 0, counts)
    if counts.sum() > MOST_STATES:
        raise InvalidInput("rate_per_s", f"keeps more than {MOST_STATES:,} sessions going")
    before = np.repeat(np.cumsum(counts) - counts, counts)
    places = np.arange(1.0, len(before) + 1.0) - before
    deaths: Rates = np.repeat(full[:-1], counts) + places * np.repeat(rates, counts)
    return deaths


def birth_death_occupancy(deaths: Rates, arrivals: float, beyond: float) -> float:
    """Returns the mean state of a birth-death process (eq. 30 and 31).

    Args:
        deaths: Rates downwards out of states 1 to C, shape (C,), ascending.
        arrivals: Rate upwards out of every state.
        beyond: Rate downwards out of every state above C, more than `arrivals`.
    """
    return _mean(_weights(deaths, arrivals), arrivals / beyond)


def _weights(deaths: Rates, arrivals: float) -> Rates:
    """Returns the probabilities of states 0 to C relative to the largest.

    Their logarithms are summed starting from the largest, so none overflows, and rounding errors
    gather in those that do not matter.
    """
    steps = np.log(arrivals / deaths)  # phi_n over phi_(n-1)
    peak = int(np.searchsorted(deaths, arrivals))  # phi grows while deaths < arrivals
    weights = np.empty(len(deaths) + 1)
    weights[peak] = 1.0
    weights[peak + 1 :] = np.exp(np.cumsum(steps[peak:]))
    weights[:peak] = np.exp(-np.cumsum(steps[:peak][::-1]))[::-1]
    return weights


def _mean(weights: Rates, load: float) -> float:
    """Returns the mean of states with these weights and a geometric tail of ratio `load`."""
    states, last = np.arange(len(weights)), len(weights) - 1
    tail = weights[-1] / (1.0 - load)
    everything = weights[:-1].sum() + tail
    beyond_mean = weights[-1] * load / (1.0 - load) ** 2 + last * tail
    return float((states[:-1] @ weights[:-1] + beyond_mean) / everything)
