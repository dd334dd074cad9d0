"""Mell's bound on the number of bins (Theorem 2), for packers that do not keep its properties."""

from __future__ import annotations

from catenary_scheduler.packing.active_bins import ActiveBins
from catenary_scheduler.packing.config import PackingConfig
from catenary_scheduler.packing.lower_bound import lower_bound
from catenary_scheduler.packing.mell.pool import MellPool
from catenary_scheduler.packing.moves import PackingMove

ADDITIVE = 3
"""Number of bins beyond 4/3 of the optimum that Mell may use: one unfilled bin of each class M, S
and T."""


def bound_on_bins(least: int) -> int:
    """Returns how many bins Mell uses at most if no packing uses fewer than `least`."""
    return 4 * least // 3 + ADDITIVE


def least_bins(active_bins: ActiveBins) -> int:
    """Returns a lower bound on the bins that the present sessions need. It sorts the sizes once."""
    items = [item for items in active_bins.bins().values() for item in items]
    return lower_bound([active_bins.size_of(item) for item in items], active_bins.capacity)


def restoring_moves(
    active_bins: ActiveBins, total: int, most_bins: int | None, config: PackingConfig
) -> tuple[PackingMove, ...]:
    """Returns moves by Mell's rules after which the bound holds; none if it holds already.

    The result is also empty if the rules would preempt a session.

    Args:
        active_bins: The bins and their sessions; no bin overflows or is empty.
        total: Sum of all sizes, which in most cases already shows that the bound holds.
        most_bins: Largest number of bins that may be active; None for any number.
        config: Weights for the choice among bins.
    """
    used = len(active_bins)
    if used <= bound_on_bins(-(-total // active_bins.capacity)):
        return ()
    if used <= bound_on_bins(least_bins(active_bins)):
        return ()
    mell = MellPool(active_bins.capacity, most_bins=most_bins, config=config)
    for gpu, items in active_bins.bins().items():
        for item in items:
            mell.place(item, active_bins.size_of(item), gpu)
    repaired = mell.epoch((), {}, {})
    return () if repaired.preempted else repaired.moves
