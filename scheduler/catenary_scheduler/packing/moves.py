"""What packing decides: who moves where, who was placed, who has to wait."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

Item = Hashable
"""A session, by whatever names it."""


@dataclass(frozen=True, slots=True)
class PackingMove:
    """A running session changes its GPU.

    Attributes:
        item: The session.
        source: Bin it leaves.
        target: Bin it goes to.
        size: Of the session, in the unit of the capacity.
    """

    item: Item
    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class EpochResult:
    """What one epoch changed.

    Attributes:
        moves: Of running sessions, in the order they were decided.
        placed: Bins of the sessions that were placed: new ones, queued ones whose turn came, and
            preempted ones.
        queued: Sessions that wait, the one whose turn is next first.
        preempted: Sessions that lost their cache, because their GPU overflowed and the policy does
            not move; each is in `placed` or in `queued` as well.
    """

    moves: tuple[PackingMove, ...] = ()
    placed: Mapping[Item, int] = field(default_factory=dict)
    queued: tuple[Item, ...] = ()
    preempted: tuple[Item, ...] = ()
