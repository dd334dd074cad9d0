"""Random lives of sessions, and checks of packing after every one of their operations.

There is also an exact twin for tiny inputs, which finds the fewest bins by trying everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from catenary_scheduler.packing.lazy.lazy_pool import LazyPool
from catenary_scheduler.packing.lower_bound import lower_bound
from catenary_scheduler.packing.mell.pool import MellPool
from catenary_scheduler.packing.moves import Item

CAPACITIES = (24, 120, 962, 1000, 16384)
ADDITIVE = 3
Operation = tuple[list[int], dict[Item, int], dict[Item, int]]
"""The arguments of `Policy.epoch`: departed items, new sizes, arrived items."""

MIXES: dict[str, Callable[[random.Random, int], int]] = {
    "uniform": lambda rng, c: rng.randint(1, c),
    "tiny": lambda rng, c: rng.randint(1, max(1, c // 4)),
    "minute": lambda rng, c: rng.randint(1, max(1, c // 7)),
    "middle": lambda rng, c: rng.randint(max(1, c // 4), max(1, c // 2)),
    "chat": lambda rng, c: min(c, max(1, int(rng.lognormvariate(-2.2, 1.0) * c))),
    "borders": lambda rng, c: min(
        c, max(1, c // rng.choice((1, 2, 3, 4, 8)) + rng.choice((-1, 0, 1)))
    ),
}
"""Distributions of sizes at arrival."""


@dataclass(slots=True)
class Tally:
    """Counts of many operations.

    Attributes:
        operations: Number of arrivals, departures and updates.
        violations: Broken invariants, with their places; empty if all hold.
        most_moves: Items moved by one operation (by one epoch, if batched), groups counted once.
        excess: The most GPUs beyond 4/3 of the lower bound.
    """

    operations: int = 0
    violations: list[str] = field(default_factory=list)
    most_moves: int = 0
    excess: float = -ADDITIVE


def operations(seed: int, count: int, capacity: int, mix: str, batch: int) -> Iterator[Operation]:
    """Yields random operations: sessions arrive, grow a little or a lot, and end.

    Args:
        seed: Seed of all random choices.
        count: Number of operations, a batch counted once.
        capacity: Capacity of a GPU.
        mix: Name of a mix of sizes.
        batch: The most operations in one batch; 1 for one by one.
    """
    rng = random.Random(seed)
    draw = MIXES[mix]
    aim = rng.choice((8, 25, 80))
    sizes: dict[int, int] = {}
    born = 0
    for _ in range(count):
        departed: list[int] = []
        grown: dict[Item, int] = {}
        arrived: dict[Item, int] = {}
        fresh: dict[int, int] = {}
        for _ in range(rng.randint(1, batch)):
            what = rng.random()
            running = list(sizes)
            if not running or what < (0.4 if len(running) < aim else 0.15):
                born += 1
                arrived[born] = fresh[born] = draw(rng, capacity)
            elif what < 0.6:
                item = rng.choice(running)
                grown.pop(item, None)
                departed.append(item)
                del sizes[item]
            else:
                item = rng.choice(running)
                more = rng.choice((1, max(1, capacity // 100), max(1, capacity // 16)))
                grown[item] = sizes[item] = min(capacity, sizes[item] + more)
                if rng.random() < 0.02:
                    grown[item] = sizes[item] = draw(rng, capacity)
        sizes.update(fresh)
        yield departed, grown, arrived


def live(
    pool: MellPool | LazyPool, happened: Iterator[Operation], capacity: int, tally: Tally, name: str
) -> None:
    """Applies operations to a pool, and adds the results to the tally."""
    sizes: dict[Item, int] = {}
    for number, (departed, grown, arrived) in enumerate(happened):
        before = {item: pool.bin_of(item) for item in sizes}
        result = pool.epoch(departed, grown, arrived)
        for gone in departed:
            del sizes[gone]
        sizes.update(grown)
        sizes.update(arrived)
        wrong = list(pool.check())
        moved = {move.item: (move.source, move.target) for move in result.moves}
        for item, size in sizes.items():
            if pool.bin_of(item) is None or pool.size_of(item) != size:
                wrong.append(f"session {item} has no place or another size")
            source = before.get(item)
            target = pool.bin_of(item)
            if source not in (None, target) and moved.pop(item, None) != (source, target):
                wrong.append(f"session {item} moved without a move")
        if moved:
            wrong.append("a move of who did not move")
        gpus, least = len(pool.bins()), lower_bound(sizes.values(), capacity)
        if 3 * (gpus - ADDITIVE) > 4 * least:
            wrong.append(f"{gpus} gpus, where {least} is a lower bound")
        moves = pool.item_moves if isinstance(pool, MellPool) else len(result.moves)
        tally.violations += [f"{name}, operation {number}: {each}" for each in wrong]
        tally.operations += len(departed) + len(grown) + len(arrived)
        tally.most_moves = max(tally.most_moves, moves)
        tally.excess = max(tally.excess, gpus - 4 / 3 * least)


def many_lives(
    make: Callable[[int], MellPool | LazyPool],
    least_operations: int,
    *,
    batch: int = 1,
    seed: int = 0,
) -> Tally:
    """Applies random lives of all mixes and capacities until there were enough operations.

    Args:
        make: Returns a pool of a capacity.
        least_operations: The least number of operations in all.
        batch: The most operations in one batch.
        seed: Seed of the first life; the others follow.
    """
    tally = Tally()
    mixes = sorted(MIXES)
    while tally.operations < least_operations:
        capacity = CAPACITIES[seed // len(mixes) % len(CAPACITIES)]
        mix = mixes[seed % len(mixes)]
        happened = operations(seed, 200, capacity, mix, batch)
        live(make(capacity), happened, capacity, tally, f"seed {seed}, {mix}, {capacity}")
        seed += 1
    return tally


def fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """Returns the fewest bins that hold all sizes, by trying everything; for a dozen sizes."""
    ordered = sorted(sizes, reverse=True)
    best = len(ordered)
    loads: list[int] = []

    def put(number: int) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if number == len(ordered):
            best = len(loads)
            return
        tried = set()
        for gpu, load in enumerate(loads):
            if load + ordered[number] <= capacity and load not in tried:
                tried.add(load)
                loads[gpu] += ordered[number]
                put(number + 1)
                loads[gpu] -= ordered[number]
        loads.append(ordered[number])
        put(number + 1)
        loads.pop()

    put(0)
    return best
