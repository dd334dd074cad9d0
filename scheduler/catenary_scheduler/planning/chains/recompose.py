"""Recomposition when servers join or leave or the load drifts, with few blocks moved.

Loading blocks costs a server seconds to minutes, so the best chains are not worth every move.
Placements are made that move more and more, from "everything stays" to "compose anew". Of those
whose mean response is within a tolerance of the best of all, the one that moves least is taken.
Composing anew is always among them, so the result can serve whatever that can serve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from catenary_scheduler.planning.chains.bounds import response_bound
from catenary_scheduler.planning.chains.gca import Range, composed, cut_chains
from catenary_scheduler.planning.chains.moves import (
    Held,
    aligned,
    filled,
    loads,
    neighbours_of_lost,
    replaced,
    slots_of,
    still_held,
)
from catenary_scheduler.planning.chains.problem import (
    ChainTask,
    Composition,
    HostedBlocks,
    PeakRate,
    Tuning,
)
from catenary_scheduler.planning.chains.sizes import TaskSizes, sizes_of
from catenary_scheduler.planning.chains.tuning import best_composition
from catenary_services.errors import InvalidInput, PlanInfeasible

TOLERANCE = 0.05
"""Share of the mean response time that may be given up in order not to move blocks."""
EVALUATIONS = 200
"""Largest number of placements that are examined to save moves: some 100 ms with up to 20
servers."""
EVALUATED_SERVERS = 20_000
"""Largest product of placements examined and servers: with more servers, fewer are examined."""


@dataclass(frozen=True, slots=True)
class _Option:
    """One placement that could be chosen, with its chains and cost."""

    wanted: Held
    composition: Composition
    cost: tuple[float, float]
    """Mean response in seconds (infinite if overloaded), and the negated total rate."""

    @property
    def effort(self) -> tuple[int, int, tuple[float, float]]:
        """Key for choosing the least effort: moved blocks, then loaded blocks, then cost."""
        return self.composition.moved_blocks, self.composition.loaded_blocks, self.cost


@dataclass(frozen=True, slots=True)
class _Recomposer:
    task: ChainTask
    sizes: TaskSizes
    held: Held
    tune: Tuning

    @property
    def budget(self) -> int:
        """Number of placements that may be examined to save moves."""
        return min(EVALUATIONS, EVALUATED_SERVERS // max(1, len(self.task.servers)) + 1)

    def option(self, wanted: Held, c: int) -> _Option:
        """Returns the chains over a placement, the blocks that it moves, and its cost."""
        task, slots = self.task, slots_of(self.sizes, wanted)
        ranges: list[Range] = [(server, *blocks) for server, blocks in sorted(wanted.items())]
        chains = composed(task, ranges, cut_chains(task, self.sizes, ranges, slots))
        moved, total = loads(self.held, wanted)
        composition = Composition(
            c=c,
            hosted=tuple(
                HostedBlocks(task.servers[server].name, first, end - first, slots[server])
                for server, first, end in ranges
            ),
            chains=chains,
            arrivals_per_s=float(task.rate_per_s),
            moved_blocks=moved,
            loaded_blocks=total,
        )
        rate = composition.total_rate_per_s
        reached = rate * float(task.load) >= composition.arrivals_per_s
        composition = replace(composition, requirement_reached=reached)
        return _Option(wanted, composition, (self._response(composition), -rate))

    def _response(self, composition: Composition) -> float:
        if not composition.chains:
            return math.inf
        tune, arrivals = self.tune, composition.arrivals_per_s
        if isinstance(tune, PeakRate):
            arrivals = float(tune.rate_per_s)
        elif callable(tune):
            return tune(composition)
        bound = response_bound(
            [chain.capacity for chain in composition.chains],
            [chain.rate_per_s for chain in composition.chains],
            arrivals,
            upper=tune == "upper",
        )
        return math.inf if bound is None else bound


def recompose(
    task: ChainTask,
    previous: Composition,
    tune: Tuning = "lower",
    tolerance: float = TOLERANCE,
) -> Composition:
    """Returns chains for servers or a load that changed, moving few blocks.

    `moved_blocks` of the result counts blocks that servers have to load although they already host
    some, and `loaded_blocks` also counts those of newcomers. Giving up blocks is not a move.
    `groups` is 0, because the blocks that stay were not placed in groups.

    Args:
        task: The present servers and the present load.
        previous: The blocks that are hosted now, by server names. Servers that left may be in it,
            and its chains may be missing.
        tune: The measure, as in `best_composition`; "surrogate" judges by the lower bound. A
            function is called some 30 times, and once more for every server that would move (at
            most 200 times).
        tolerance: Largest relative loss of mean response against the best found. If the load is too
            high for all placements, it is the largest loss of the total rate.

    Raises:
        InvalidInput: The tolerance is negative.
        PlanInfeasible: No chain through all blocks is possible.
    """
    if not tolerance >= 0:
        raise InvalidInput("tolerance", "must not be below 0")
    sizes = sizes_of(task)
    recomposer = _Recomposer(task, sizes, still_held(task, sizes, previous.hosted), tune)
    options = list(_keeping(recomposer, previous))
    try:
        anew = best_composition(task, tune)
    except PlanInfeasible:
        if not any(option.composition.chains for option in options):
            raise
    else:
        options += _anew(recomposer, anew)
    limit = _limit(min(option.cost for option in options), tolerance)
    good = [option for option in options if option.cost <= limit]
    found = _undone(recomposer, min(good, key=lambda option: option.effort), limit)
    if found.composition.moved_blocks and not callable(tune):
        values = {previous.c, found.composition.c}
        few = _single_moves(recomposer, options, values, limit)
        found = min([found, *few], key=lambda option: option.effort)
    return found.composition


def _keeping(recomposer: _Recomposer, previous: Composition) -> Iterator[_Option]:
    """Yields the placements that keep most blocks.

    The first keep all blocks, the next those that chains use, and the last only those of chains
    that have lost no server.
    """
    task, sizes, held, c = recomposer.task, recomposer.sizes, recomposer.held, previous.c
    if task.stop == "rate" and held:
        yield recomposer.option(held, c)
    everything = recomposer.option(filled(sizes, held, c), c)
    yield everything
    chains = everything.composition.chains
    idle = set(held) - {task.number_of[hop.server] for chain in chains for hop in chain.hops}
    before = [[hop.server for hop in chain.hops] for chain in previous.chains]
    broken = neighbours_of_lost(task, before, held)
    for released in (idle, idle | broken):
        if released:
            kept = {server: blocks for server, blocks in held.items() if server not in released}
            yield recomposer.option(filled(sizes, kept, c), c)


def _anew(recomposer: _Recomposer, anew: Composition) -> Iterator[_Option]:
    wanted = {
        recomposer.task.number_of[item.server]: (item.first_block, item.last_block)
        for item in anew.hosted
    }
    yield recomposer.option(aligned(recomposer.sizes, recomposer.held, wanted), anew.c)
    yield recomposer.option(wanted, anew.c)


def _single_moves(
    recomposer: _Recomposer,
    options: Sequence[_Option],
    values: set[int],
    limit: tuple[float, float],
) -> Iterator[_Option]:
    """Yields the placement that the best single moves lead to, if it is good enough.

    Starting from the placement that keeps most, each server in turn is tried where it is needed
    most, and the best of these moves is made.
    """
    at = min(options, key=lambda option: option.effort)
    left = recomposer.budget
    while left >= len(at.wanted) * len(values) and at.cost > limit:
        tried = [
            recomposer.option(replaced(recomposer.sizes, at.wanted, server, c), c)
            for server in at.wanted
            for c in values
        ]
        left -= len(tried)
        best = min(tried, key=lambda option: (option.cost, option.effort))
        if best.cost >= at.cost:
            return
        at = best
    if at.cost <= limit:
        yield at


def _undone(recomposer: _Recomposer, found: _Option, limit: tuple[float, float]) -> _Option:
    """Returns the option without those moves that are not needed, undone from the largest on."""
    held = recomposer.held
    moves = _moved_servers(held, found.wanted)
    together = -(-len(moves) // recomposer.budget)
    for begin in range(0, len(moves), max(1, together)):
        back = {server: held[server] for server in moves[begin : begin + together]}
        option = recomposer.option(found.wanted | back, found.composition.c)
        if option.cost <= limit:
            found = option
    return found


def _moved_servers(held: Held, wanted: Held) -> Sequence[int]:
    moved = {
        server: loads(held, {server: blocks})[0]
        for server, blocks in wanted.items()
        if server in held
    }
    return sorted((server for server in moved if moved[server]), key=lambda at: -moved[at])


def _limit(best: tuple[float, float], tolerance: float) -> tuple[float, float]:
    response, rate = best
    if math.isfinite(response):
        return response * (1.0 + tolerance), 0.0
    return response, rate / (1.0 + tolerance)
