"""Results of packing: who moves where, who was placed, and who has to wait."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

Item = Hashable
"""A session, under whatever key identifies it."""


@dataclass(frozen=True, slots=True)
class PackingMove:
    """Move of a running session from one GPU to another.

    Attributes:
        item: The session.
        source: Number of the bin it leaves.
        target: Number of the bin it goes to.
        size: Size of the session, in the unit of the capacity.
    """

    item: Item
    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class EpochResult:
    """Changes that one epoch has made.

    Attributes:
        moves: Moves of running sessions, in the order in which they were decided.
        placed: Bins of the sessions that were placed: new ones, queued ones whose turn came, and
            preempted ones that found another place.
        queued: Sessions that wait, in the order of their turns.
        preempted: Sessions that lost their cache, because their GPU overflowed and they could not
            be moved. Each is in `placed` or in `queued` as well.
    """

    moves: tuple[PackingMove, ...] = ()
    placed: Mapping[Item, int] = field(default_factory=dict)
    queued: tuple[Item, ...] = ()
    preempted: tuple[Item, ...] = ()
