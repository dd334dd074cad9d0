"""Groups the chains of a model that are packed together."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.dispatch.chained.packing.pool import ChainPool
from catenary_scheduler.dispatch.chained.packing.view import PackedChain
from catenary_services.domain.packing import PackingGoal


def pools_of(
    goal: PackingGoal,
    chains: Sequence[tuple[PackedChain, tuple[str, ...]]],
    similar: float,
    balance_threshold: float,
) -> list[ChainPool]:
    """Returns pools of chains that are alike (completion G17: classes are relative to capacity).

    Args:
        goal: The goal of all pools.
        chains: Each chain with its kind: role and classes of devices.
        similar: Chains of one kind share a pool if the smallest holds this share of the largest.
        balance_threshold: Share of a chain by which loads may differ and count as even.
    """
    kinds: dict[tuple[str, ...], list[PackedChain]] = {}
    for chain, kind in chains:
        kinds.setdefault(kind, []).append(chain)
    pools: list[ChainPool] = []
    for alike in kinds.values():
        alike.sort(key=lambda chain: -chain.capacity)
        while alike:
            least = similar * alike[0].capacity
            count = sum(1 for chain in alike if chain.capacity >= least)
            mine = sorted(alike[:count], key=_preference)
            pools.append(ChainPool(goal, mine, balance_threshold))
            for chain in mine:
                chain.pool = len(pools) - 1
            del alike[:count]
    return pools


def _preference(chain: PackedChain) -> tuple[int, int]:
    """Sort key that prefers fast chains, and among equals the first of the plan."""
    return chain.route.service_ns, chain.route.index
