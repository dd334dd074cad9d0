"""Mell's operations one at a time: epochs in which one thing happens."""

from __future__ import annotations

from catenary_scheduler.packing.moves import Item, PackingMove
from catenary_scheduler.packing.policies import PackingPolicy


def allocate(pool: PackingPolicy, item: Item, size: int) -> list[PackingMove]:
    """Places a new session, and returns the moves of others."""
    return list(pool.epoch((), {}, {item: size}).moves)


def depart(pool: PackingPolicy, item: Item) -> list[PackingMove]:
    """Ends a session, and returns the moves of others."""
    return list(pool.epoch((item,), {}, {}).moves)


def update(pool: PackingPolicy, item: Item, size: int) -> list[PackingMove]:
    """Sets the size of a session, and returns the moves that follow, its own included."""
    return list(pool.epoch((), {item: size}, {}).moves)
