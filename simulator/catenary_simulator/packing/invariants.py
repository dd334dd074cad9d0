"""Invariants that hold after every epoch of any policy, checked from outside the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from catenary_scheduler.packing.lazy.lazy_pool import LazyPool
from catenary_scheduler.packing.mell.pool import MellPool
from catenary_scheduler.packing.moves import Item
from catenary_scheduler.packing.policies import PackingPolicy


def violations(
    policy: PackingPolicy, capacity: int, sizes: Mapping[Item, int], queued: Set[Item]
) -> list[str]:
    """Returns a sentence for each violated invariant; empty if all hold.

    Every GPU holds at most its capacity and at least one session, every session is on one GPU or
    queued, and its size is the one it was told.

    Args:
        policy: The policy after an epoch.
        capacity: Capacity of a GPU.
        sizes: Sizes of all present sessions.
        queued: The sessions that wait.
    """
    found: list[str] = []
    seen: set[Item] = set()
    for gpu, items in policy.bins().items():
        load = 0
        for item in items:
            if item in seen:
                found.append(f"session {item} is there twice")
            seen.add(item)
            if policy.size_of(item) != sizes.get(item):
                found.append(f"session {item} has another size")
            load += policy.size_of(item)
        if load > capacity:
            found.append(f"GPU {gpu} holds {load} of {capacity}")
        if not items:
            found.append(f"GPU {gpu} is active and empty")
    if seen & queued:
        found.append("a queued session is placed")
    if len(seen | queued) != len(sizes):
        found.append(f"of {len(sizes)} sessions {len(seen | queued)} are known")
    return found


def broken_rules(policy: PackingPolicy) -> Sequence[str]:
    """Returns the properties P1 to P5 of Mell that do not hold; empty for other policies."""
    return policy.check() if isinstance(policy, MellPool | LazyPool) else ()
