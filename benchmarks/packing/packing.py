"""Time of a packing decision with 1,000 live sessions, and the bounds that packing keeps.

The first part is an hour of a busy cluster in small: a thousand sessions that grow, some of which
end in every epoch while as many arrive. The second part counts violations over random operations.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from statistics import median

from benchmarks.packing.packing_operations import ADDITIVE, Tally, many_lives
from catenary_lab.limits import Figure, at_least, at_most
from catenary_scheduler.packing.lazy.lazy_pool import LazyPool
from catenary_scheduler.packing.mell.pool import MellPool
from catenary_scheduler.packing.moves import Item

SESSIONS = 1000
CAPACITY = 962
"""Blocks of 16 tokens: 15,400 tokens, as the 7B model on a 4090 (Mell, Fig. 11)."""
BLOCKS_PER_EPOCH = 2.5
"""Growth of a session in a second, at 25 ms a token."""
LIMIT_US = 200.0
MOST_MOVES = 10

Maker = Callable[[int], MellPool | LazyPool]
POLICIES: tuple[tuple[str, Maker], ...] = (("pack", LazyPool), ("mell", MellPool))


def run(quick: bool) -> list[Figure]:
    """Returns the figures; the random lives are the same every time."""
    figures: list[Figure] = []
    for name, make in POLICIES:
        figures += _times(name, make, 60 if quick else 300)
        single = many_lives(make, 10_000 if quick else 100_000)
        figures += _kept(f"{name}, one by one", single, MOST_MOVES)
        batched = many_lives(make, 10_000 if quick else 100_000, batch=8, seed=10_000)
        figures += _kept(f"{name}, batched", batched, None)
    return figures


def _times(name: str, make: Maker, epochs: int) -> list[Figure]:
    """Times whole epochs, and single operations between them."""
    rng = random.Random(1)
    pool = make(CAPACITY)
    sizes: dict[int, float] = {}
    born = 0
    whole: list[float] = []
    decisions: list[float] = []
    single: list[float] = []
    gc.collect()
    gc.freeze()
    for epoch in range(epochs + 50):
        departed = [item for item in sizes if rng.random() < 0.02 or sizes[item] > 0.9 * CAPACITY]
        for item in departed:
            del sizes[item]
        for item in sizes:
            sizes[item] += BLOCKS_PER_EPOCH
        arrived: dict[Item, int] = {}
        while len(sizes) < SESSIONS:
            born += 1
            sizes[born] = arrived[born] = min(CAPACITY // 2, int(rng.lognormvariate(3.4, 1)) + 1)
        grown: dict[Item, int] = {
            item: int(size) for item, size in sizes.items() if item not in arrived
        }
        began = time.thread_time()
        pool.epoch(departed, grown, arrived)
        took_us = (time.thread_time() - began) * 1e6
        if epoch >= 50:
            whole.append(took_us)
            decisions.append(took_us / (len(departed) + len(arrived) + len(grown)))
            single += _single(pool, born + 1, rng)
            born += 1
    gc.unfreeze()
    single.sort()
    return [
        at_most(f"{name}: one operation, {SESSIONS} sessions, p50", median(single), "us", LIMIT_US),
        at_most(f"{name}: the same, p99", single[int(0.99 * len(single))], "us"),
        at_most(f"{name}: each of an epoch's operations, p50", median(decisions), "us", LIMIT_US),
        at_most(f"{name}: a whole epoch of {SESSIONS} updates and more, p50", median(whole), "us"),
        at_most(f"{name}: the same, the longest", max(whole), "us"),
    ]


def _single(pool: MellPool | LazyPool, item: int, rng: random.Random) -> list[float]:
    """Returns the microseconds of an arrival, of its growth and of its end."""
    size = min(CAPACITY // 2, int(rng.lognormvariate(3.4, 1)) + 1)
    steps: tuple[tuple[tuple[Item, ...], dict[Item, int], dict[Item, int]], ...] = (
        ((), {}, {item: size}),
        ((), {item: size + 30}, {}),
        ((item,), {}, {}),
    )
    times = []
    for departed, grown, arrived in steps:
        began = time.thread_time()
        pool.epoch(departed, grown, arrived)
        times.append((time.thread_time() - began) * 1e6)
    return times


def _kept(name: str, tally: Tally, most_moves: int | None) -> list[Figure]:
    return [
        at_least(f"{name}: random operations lived through", tally.operations, "", 10_000),
        at_most(f"{name}: violations (P1-P5, capacity, bound)", len(tally.violations), "", 0),
        at_most(f"{name}: GPUs beyond 4/3 of the lower bound", tally.excess, "gpus", ADDITIVE),
        at_most(f"{name}: items moved at once, at most", tally.most_moves, "moves", most_moves),
    ]
