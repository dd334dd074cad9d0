"""Pieces of a recomposition: what stays, where free servers go, and what has to be loaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from catenary_scheduler.planning.chains.problem import ChainTask, HostedBlocks
from catenary_scheduler.planning.chains.sizes import TaskSizes

Held = dict[int, tuple[int, int]]
"""Server number to blocks [first, end)."""


def still_held(task: ChainTask, sizes: TaskSizes, hosted: Iterable[HostedBlocks]) -> Held:
    """Returns what servers that are still there host and still have memory for."""
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
    """Returns blocks to load on servers that host something already, and on all together."""
    moved = total = 0
    for server, (first, end) in wanted.items():
        new = end - first - _overlap(held.get(server), (first, end))
        total += new
        moved += new if server in held else 0
    return moved, total


def filled(sizes: TaskSizes, kept: Held, c: int) -> Held:
    """Returns `kept` and all other servers, each where fewest sessions find room.

    The fastest per block come first, with m_j(c) blocks (eq. 8) on the window whose sorted room
    per block is lexicographically least, the first of equals: holes are closed first, and from an
    even start consecutive servers line up into groups as in GBP-CR.
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
    """Returns a placement with one server put where it is needed most, as in `filled`."""
    others = {other: blocks for other, blocks in wanted.items() if other != server}
    blocks = int(sizes.max_blocks(c)[server])
    if not blocks:
        return others
    room = [0] * sizes.blocks
    for other, held in others.items():
        _add_room(sizes, room, other, held)
    return others | {server: _weakest(room, blocks)}


def aligned(sizes: TaskSizes, held: Held, wanted: Held) -> Held:
    """Returns `wanted` with equal servers exchanged so that most find what they host already.

    Equal are servers with the same memory, speed and sizes; their communication times may differ.
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
    # Whole ranges rather than servers: few differ, however many servers there are.
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
    """Returns servers that had a chain together with one that hosts nothing any more."""
    broken = set()
    for names in chains:
        numbers = {task.number_of.get(name) for name in names}
        if not numbers <= set(held):
            broken |= {number for number in numbers if number in held}
    return {number for number in broken if number is not None}


def slots_of(sizes: TaskSizes, wanted: Held) -> list[int]:
    """Returns cache slots per server number."""
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
