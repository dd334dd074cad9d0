"""Order in which sessions move, so that no bin ever holds more than it can (completion G15).

A session that moves is held twice: its source keeps the caches until the hand-over, and its target
needs room for them from the beginning. Moves therefore start in waves: first those for which there
is room now, then those for which there is room once these are done, and so on.

Moves that wait for each other in a circle never get their turn. They are deferred to the next
epoch, when sessions may have ended. The alternative is to drop a session's caches first and read
its tokens again at the target. It is not used: a live move by tokens continues at the source while
the target reads, so it holds memory on both as well. A move that stops first would halt a stream
for as long as reading takes, to save memory that nobody lacks yet. If memory is really lacking, the
agent that lacks it does this to its youngest session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from catenary_scheduler.packing.moves import Item, PackingMove

Preference = Callable[[PackingMove, bool], tuple[object, ...]]
"""Rank of a move, given whether others wait for the room that it leaves; the smaller, the
sooner."""


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Order in which moves begin, and the moves that cannot.

    Attributes:
        waves: Moves that may go at the same time, once the waves before are done.
        deferred: Moves for which no room was found in any wave.
    """

    waves: tuple[tuple[PackingMove, ...], ...]
    deferred: tuple[PackingMove, ...]


def in_waves(moves: Sequence[PackingMove], room: Mapping[int, int]) -> TransferOrder:
    """Returns the moves in an order that never takes more room than there is.

    The order is greedy: each wave prefers moves that others wait for, and of these the smallest. If
    that leaves moves over, other preferences are tried, and then orders of one move at a time, up
    to `_MOST_STATES` states. The order that defers the fewest moves wins, then the one with the
    fewest waves, then the first.

    Args:
        moves: The moves; each item occurs once.
        room: Free room of every bin now, in the unit of the sizes. A bin that is missing has none.
    """
    best = _greedy(moves, room, _PREFERENCES[0])
    for preference in _PREFERENCES[1:]:
        if best.deferred:
            best = min(best, _greedy(moves, room, preference), key=_loss)
    if best.deferred:
        best = min(best, _together(_searched(moves, room), moves, room), key=_loss)
    return best


_MOST_STATES = 500
"""Number of states (sets of moves begun) that the search examines at most. It bounds the search to
some milliseconds and limits the depth of recursion."""
_PREFERENCES: tuple[Preference, ...] = (
    lambda move, awaited: (not awaited, move.size),
    lambda move, awaited: (not awaited, -move.size),
    lambda move, awaited: (move.size,),
    lambda move, awaited: (-move.size,),
)


def _loss(ordering: TransferOrder) -> tuple[int, int]:
    return len(ordering.deferred), len(ordering.waves)


def _greedy(
    moves: Sequence[PackingMove], room: Mapping[int, int], preference: Preference
) -> TransferOrder:
    free = dict(room)
    left, waves = list(moves), []
    while left:
        wave = _wave(left, free, preference)
        if not wave:
            break
        waves.append(tuple(wave))
        for move in wave:
            _do(move, free)
        begun = {move.item for move in wave}
        left = [move for move in left if move.item not in begun]
    return TransferOrder(tuple(waves), tuple(left))


def _wave(
    left: Sequence[PackingMove], free: Mapping[int, int], preference: Preference
) -> list[PackingMove]:
    """Returns moves that may begin together; the room they leave is not free meanwhile."""
    awaited = {move.target for move in left if move.size > free.get(move.target, 0)}
    room = dict(free)
    wave = []
    for move in sorted(left, key=lambda move: preference(move, move.source in awaited)):
        if move.size <= room.get(move.target, 0):
            room[move.target] -= move.size
            wave.append(move)
    return wave


def _searched(moves: Sequence[PackingMove], room: Mapping[int, int]) -> list[PackingMove]:
    """Returns the longest order of one move at a time that the search finds."""
    longest: list[PackingMove] = []
    order: list[PackingMove] = []
    seen: set[frozenset[Item]] = set()
    free = dict(room)

    def search(left: list[PackingMove]) -> None:
        nonlocal longest
        key = frozenset(move.item for move in left)
        if key in seen or len(seen) >= _MOST_STATES or len(longest) == len(moves):
            return
        seen.add(key)
        if len(order) > len(longest):
            longest = list(order)
        for move in left:
            if move.size <= free.get(move.target, 0):
                _do(move, free)
                order.append(move)
                search([other for other in left if other is not move])
                order.pop()
                _do(move, free, -1)

    search(list(moves))
    return longest


def _together(
    order: Sequence[PackingMove], moves: Sequence[PackingMove], room: Mapping[int, int]
) -> TransferOrder:
    """Groups an order of one move at a time into as few waves as that order allows."""
    free, waves = dict(room), []
    at = 0
    while at < len(order):
        begun, wave = dict(free), []
        while at < len(order) and order[at].size <= begun.get(order[at].target, 0):
            begun[order[at].target] -= order[at].size
            wave.append(order[at])
            at += 1
        for move in wave:
            _do(move, free)
        waves.append(tuple(wave))
    done = {move.item for move in order}
    return TransferOrder(tuple(waves), tuple(move for move in moves if move.item not in done))


def _do(move: PackingMove, free: dict[int, int], sign: int = 1) -> None:
    """Applies a move to the free room, or undoes it if `sign` is -1."""
    free[move.target] = free.get(move.target, 0) - sign * move.size
    free[move.source] = free.get(move.source, 0) + sign * move.size
