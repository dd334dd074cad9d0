"""The response bound of chains that are still being cut, with as few of them as it takes.

GCA cuts the fastest chains first, and those the last ones come to are hardly ever used. So the
search over c stops cutting as soon as it knows the lower bound, or that a placement is no better
than the best so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from catenary_scheduler.planning.chains.bounds import prefix_bounds, response_bound
from catenary_scheduler.planning.chains.gca import Cut

KNOWN = 1e-14
"""Relative distance of the ends at which the lower bound counts as known."""
GROWTH = 1.15
"""By how much the job servers grow between two looks."""


def bounded_response_s(
    cuts: Iterable[Cut], arrivals_per_s: float, worst_s: float, *, upper: bool
) -> float | None:
    """Returns the bound of Theorem 3.7 for the chains, in seconds.

    Args:
        cuts: Chains as GCA yields them, the fastest first; read no further than needed.
        arrivals_per_s: lambda.
        worst_s: Responses of this or more do not matter.
        upper: Which of the bounds; the upper one needs all chains unless it is too long anyway.

    Returns:
        None if the load is too high, or the bound is `worst_s` or more.
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
