"""Pieces of a recomposition: servers that stay, places for free servers, and blocks to load."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from catenary_scheduler.planning.chains.problem import ChainTask, HostedBlocks
from catenary_scheduler.planning.chains.sizes import TaskSizes

Held = dict[int, tuple[int, int]]
"""Range of blocks [first, end) by server number."""


def still_held(task: ChainTask, sizes: TaskSizes, hosted: Iterable[HostedBlocks]) -> Held:
    """Returns the blocks of servers that are still present and still have memory for them."""
    held = {}
    for item in hosted:
        server = task.number_of.get(item.server)
        if (
            server is not None
            and item.last_block <= task.blocks
            and sizes.memory[server] >= sizes.block_memory[server] * item.blocks
        ):
            held[server] = (item.first_block, item.last_block)
    return held


def loads(held: Held, wanted: Held) -> tuple[int, int]:
    """Returns how many blocks to load on servers that already host some, and on all servers."""
    moved = total = 0
    for server, (first, end) in wanted.items():
        new = end - first - _overlap(held.get(server), (first, end))
        total += new
        moved += new if server in held else 0
    return moved, total


def filled(sizes: TaskSizes, kept: Held, c: int) -> Held:
    """Returns `kept` with all other servers added, each where the fewest sessions find room.

    The fastest servers per block come first. Each gets m_j(c) blocks (eq. 8) on the window whose
    sorted room per block is lexicographically least, the first of equal ones. Holes are thus closed
    first, and from an even start consecutive servers line up into groups as in GBP-CR.
    """
    limits = sizes.max_blocks(c).tolist()
    room = [0] * sizes.blocks
    for server, (first, end) in kept.items():
        _add_room(sizes, room, server, (first, end))
    wanted = dict(kept)
    free = [server for server, mine in enumerate(limits) if mine and server not in kept]
    free.sort(key=lambda server: sizes.service(server, limits[server]) / limits[server])
    for server in free:
        wanted[server] = _weakest(room, limits[server])
        _add_room(sizes, room, server, wanted[server])
    return wanted


def replaced(sizes: TaskSizes, wanted: Held, server: int, c: int) -> Held:
    """Returns a placement after one server was moved to where it is needed most, as in `filled`."""
    others = {other: blocks for other, blocks in wanted.items() if other != server}
    blocks = int(sizes.max_blocks(c)[server])
    if not blocks:
        return others
    room = [0] * sizes.blocks
    for other, held in others.items():
        _add_room(sizes, room, other, held)
    return others | {server: _weakest(room, blocks)}


def aligned(sizes: TaskSizes, held: Held, wanted: Held) -> Held:
    """Returns `wanted` with equal servers exchanged, so that most get blocks they already host.

    Servers are equal if they have the same memory, speed and sizes. Their communication times may
    differ.
    """
    kinds: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    columns = (sizes.memory, sizes.compute, sizes.block_memory, sizes.cache_memory)
    for server, kind in enumerate(zip(*columns, strict=True)):
        kinds[kind].append(server)
    result: Held = {}
    for members in kinds.values():
        result.update(_matched(members, held, wanted))
    return result


def _matched(members: Sequence[int], held: Held, wanted: Held) -> Held:
    targets = Counter(wanted[server] for server in members if server in wanted)
    holders: defaultdict[tuple[int, int] | None, list[int]] = defaultdict(list)
    for server in reversed(members):
        holders[held.get(server)].append(server)
    # Ranges are matched rather than servers, because few of them differ, however many servers there
    # are.
    pairs = sorted(
        (-_overlap(have, want), want, have or (-1, -1)) for have in holders for want in targets
    )
    result = {}
    for _, want, have in pairs:
        servers = holders[None if have == (-1, -1) else have]
        while servers and targets[want]:
            result[servers.pop()] = want
            targets[want] -= 1
    return result


def neighbours_of_lost(
    task: ChainTask, chains: Iterable[Sequence[str]], held: Mapping[int, tuple[int, int]]
) -> set[int]:
    """Returns the servers that shared a chain with one that no longer hosts anything."""
    broken = set()
    for names in chains:
        numbers = {task.number_of.get(name) for name in names}
        if not numbers <= set(held):
            broken |= {number for number in numbers if number in held}
    return {number for number in broken if number is not None}


def slots_of(sizes: TaskSizes, wanted: Held) -> list[int]:
    """Returns the cache slots of each server, by server number."""
    slots = [0] * len(sizes.memory)
    for server, (first, end) in wanted.items():
        slots[server] = sizes.cache_slots(server, end - first)
    return slots


def _weakest(room: Sequence[int], blocks: int) -> tuple[int, int]:
    first = min(range(len(room) - blocks + 1), key=lambda at: sorted(room[at : at + blocks]))
    return first, first + blocks


def _add_room(sizes: TaskSizes, room: list[int], server: int, blocks: tuple[int, int]) -> None:
    first, end = blocks
    sessions = sizes.cache_slots(server, end - first) // (end - first)
    for block in range(first, end):
        room[block] += sessions


def _overlap(one: tuple[int, int] | None, other: tuple[int, int]) -> int:
    return 0 if one is None else max(0, min(one[1], other[1]) - max(one[0], other[0]))
