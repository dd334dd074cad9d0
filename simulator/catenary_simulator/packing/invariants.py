"""What has to hold after every epoch, whoever decides; seen from outside the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from catenary_scheduler.packing.lazy.lazy_pool import LazyPool
from catenary_scheduler.packing.mell.pool import MellPool
from catenary_scheduler.packing.moves import Item
from catenary_scheduler.packing.policies import PackingPolicy


def violations(
    policy: PackingPolicy, capacity: int, sizes: Mapping[Item, int], queued: Set[Item]
) -> list[str]:
    """Returns what does not hold, in words; empty if all does.

    Every GPU holds at most its capacity and at least one session, every session is on one GPU or
    queued, and its size is the one it was told.

    Args:
        policy: After an epoch.
        capacity: Of a GPU.
        sizes: Of all sessions there are.
        queued: Those of them that wait.
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
    """Returns which of Mell's own properties (P1-P5) do not hold; none of other policies."""
    return policy.check() if isinstance(policy, MellPool | LazyPool) else ()
