"""Cost of composing server chains: the search over all c, and composing again.

Servers are those of the paper's evaluation: BLOOM-176B in 70 blocks of 1.32 GB, caches of 0.11 GB,
a fifth of the servers with 40 GB and the others with 20 GB, each at its own distance. The load
grows with the servers. Composing again follows the loss of a server, and counts what moves. Times
are CPU time of the thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from catenary_lab.limits import Figure, at_most
from catenary_scheduler.planning.chains import (
    ChainTask,
    Composition,
    Server,
    best_composition,
    compose,
    recompose,
)
from catenary_scheduler.planning.chains.problem import StopRule

LIMIT_1000_S = 1.5
LIMIT_10000_S = 20.0
ARRIVALS_PER_SERVER = 0.05
T = TypeVar("T")


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    figures = _searches(20, None) + _searches(1_000, LIMIT_1000_S)
    if not quick:
        figures += _searches(10_000, LIMIT_10000_S)
    figures += _mixed(1_000, LIMIT_1000_S)
    figures += _linked(100 if quick else 300)
    return figures + _again(20) + _again(1_000)


def _task(servers: int, stop: StopRule = "all", *, mixed: bool = False) -> ChainTask:
    chance = random.Random(servers)
    made = []
    for number in range(servers):
        large = chance.random() < 0.2
        # tau_c is (round trip + 18 ms) for each of 20 tokens, as in the authors' experiments.
        away = round(20 * (chance.uniform(0.005, 0.06) + 0.018), 6)
        memory = round(chance.uniform(16, 48), 1) if mixed else (40 if large else 20)
        speed = round(chance.uniform(0.1, 0.2), 4) if mixed else (0.109 if large else 0.175)
        made.append(Server(f"server-{number}", memory, away, speed))
    return ChainTask(
        tuple(made), 70, 1.32, 0.11, round(ARRIVALS_PER_SERVER * servers, 3), stop=stop
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    begun = time.thread_time()
    result = work()
    return result, time.thread_time() - begun


def _searches(servers: int, limit_s: float | None) -> list[Figure]:
    figures = []
    rules: tuple[StopRule, ...] = ("all", "rate")
    for stop in rules:
        task = _task(servers, stop)
        composition, seconds = _timed(lambda task=task: best_composition(task))  # type: ignore[misc]
        name = f"{servers:,} servers, search over all c, {_words(stop)}"
        figures.append(at_most(name, seconds, "s", limit_s))
    _, seconds = _timed(lambda: compose(task, composition.c))
    return [*figures, at_most(f"{servers:,} servers, one c", seconds * 1e3, "ms")]


def _mixed(servers: int, limit_s: float) -> list[Figure]:
    """Returns the figures of servers no two of which are alike: nearly every c places anew."""
    _, seconds = _timed(lambda: best_composition(_task(servers, mixed=True)))
    name = f"{servers:,} servers, no two alike, search over all c"
    return [at_most(name, seconds, "s", limit_s)]


def _linked(servers: int) -> list[Figure]:
    """Returns the figures of servers with a time for every pair, by their places on a line."""
    task = _task(servers)
    chance = random.Random(servers)
    places: dict[str | None, float] = {server.name: chance.random() for server in task.servers}
    places[None] = 0.5
    links = {
        (one, other): 0.4 + abs(places[one] - places[other])
        for one in places
        for other in places
        if one != other
    }
    _, seconds = _timed(lambda: best_composition(replace(task, links=links)))
    return [at_most(f"{servers:,} servers, a time per pair, search over all c", seconds, "s")]


def _again(servers: int) -> list[Figure]:
    task = _task(servers)
    before = best_composition(task)
    less = replace(task, servers=task.servers[1:])
    again, seconds = _timed(lambda: recompose(less, before))
    anew = _moved(before, best_composition(less))
    return [
        at_most(f"{servers:,} servers, one leaves: recompose", seconds * 1e3, "ms"),
        at_most(
            f"{servers:,} servers, one leaves: blocks moved", again.moved_blocks, "blocks", anew
        ),
        at_most(f"{servers:,} servers, one leaves: moved composing anew", anew, "blocks"),
    ]


def _moved(before: Composition, after: Composition) -> int:
    held = {item.server: item for item in before.hosted}
    moved = 0
    for item in after.hosted:
        old = held.get(item.server)
        if old is not None:
            kept = min(item.last_block, old.last_block) - max(item.first_block, old.first_block)
            moved += item.blocks - max(0, kept)
    return moved


def _words(stop: StopRule) -> str:
    return "all servers" if stop == "all" else "stop at the rate"
