"""In which order sessions move, so that no bin ever holds more than it can (completion G15).

A session that moves is held twice: its source keeps the caches until the hand-over, and its target
needs room for them from the beginning. So moves are started in waves: those for which there is room
now, then those for which there is when these are done, and so on.

Moves that wait for each other in a circle never get their turn. They are deferred to the next
epoch, which sees what has ended or shrunk by then. The other way out, to let go of a session's
caches first and to read its tokens again at the target, is not taken: a live move by tokens goes on
at the source while the target reads, and holds both as well; and one that does not would stop a
stream for as long as reading takes, to save memory that nobody lacks yet. It is what happens if the
memory is really lacking, to the youngest session and by the agent that lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from catenary_scheduler.packing.moves import Item, PackingMove

Preference = Callable[[PackingMove, bool], tuple[object, ...]]
"""Of a move and whether others wait for what it leaves: the smaller, the sooner."""


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """When moves begin.

    Attributes:
        waves: Of each wave, the moves that may go at the same time, once those before are done.
        deferred: Those for which no room was found, whatever goes before them.
    """

    waves: tuple[tuple[PackingMove, ...], ...]
    deferred: tuple[PackingMove, ...]


def in_waves(moves: Sequence[PackingMove], room: Mapping[int, int]) -> TransferOrder:
    """Returns the moves in an order that never takes more room than there is.

    Greedy: in each wave first what others wait for, and of these the smallest. Where that leaves
    moves over, other preferences are tried, then orders of one move at a time as far as
    `_MOST_STATES` go; what defers the fewest wins, then the fewest waves, then the first.

    Args:
        moves: Each item once.
        room: Free room of every bin now, in the unit of the sizes; a bin without has none.
    """
    best = _greedy(moves, room, _PREFERENCES[0])
    for preference in _PREFERENCES[1:]:
        if best.deferred:
            best = min(best, _greedy(moves, room, preference), key=_loss)
    if best.deferred:
        best = min(best, _together(_searched(moves, room), moves, room), key=_loss)
    return best


_MOST_STATES = 500
"""Sets of moves begun that are looked at: some milliseconds, and no deeper recursion."""
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
    """Returns moves that may begin together; what they leave is not free until they are done."""
    awaited = {move.target for move in left if move.size > free.get(move.target, 0)}
    room = dict(free)
    wave = []
    for move in sorted(left, key=lambda move: preference(move, move.source in awaited)):
        if move.size <= room.get(move.target, 0):
            room[move.target] -= move.size
            wave.append(move)
    return wave


def _searched(moves: Sequence[PackingMove], room: Mapping[int, int]) -> list[PackingMove]:
    """Returns the longest order of one move at a time that was found."""
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
    """Returns an order of one move at a time in waves, as few as its order allows."""
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
    """Has a move be done, or undone."""
    free[move.target] = free.get(move.target, 0) - sign * move.size
    free[move.source] = free.get(move.source, 0) + sign * move.size
