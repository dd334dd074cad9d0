"""Response bound of chains that are still being cut, from as few of them as possible.

GCA cuts the fastest chains first, and the last ones are hardly ever used. The search over c
therefore stops cutting once it knows the lower bound, or knows that a placement is no better than
the best so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from catenary_scheduler.planning.chains.bounds import prefix_bounds, response_bound
from catenary_scheduler.planning.chains.gca import Cut

KNOWN = 1e-14
"""Relative distance of the ends of the interval at which the lower bound counts as known."""
GROWTH = 1.15
"""Factor by which the number of job servers grows between two evaluations."""


def bounded_response_s(
    cuts: Iterable[Cut], arrivals_per_s: float, worst_s: float, *, upper: bool
) -> float | None:
    """Returns the bound of Theorem 3.7 for the chains, in seconds.

    Args:
        cuts: Chains as GCA yields them, the fastest first. No more of them are read than needed.
        arrivals_per_s: Arrival rate lambda.
        worst_s: Response time from which on the bound is not wanted.
        upper: Whether to return the upper bound, which needs all chains unless it reaches `worst_s`
            anyway.

    Returns:
        The bound; None if the load is too high, or if it is clear that the bound is `worst_s` or
        more.
    """
    capacities: list[int] = []
    rates: list[float] = []
    job_servers, look = 0, 0.0
    for _, capacity, service_s in cuts:
        if not capacities:
            if service_s >= worst_s:  # no session is faster than the fastest chain
                return None
            offered = arrivals_per_s * service_s
            look = offered + math.sqrt(offered)
        capacities.append(capacity)
        rates.append(1.0 / service_s)
        job_servers += capacity
        if job_servers >= look:
            least, most = prefix_bounds(capacities, rates, arrivals_per_s)
            if least >= worst_s:
                return None
            if not upper and most - least <= KNOWN * least:
                return most
            look = GROWTH * job_servers
    return response_bound(capacities, rates, arrivals_per_s, upper=upper)
