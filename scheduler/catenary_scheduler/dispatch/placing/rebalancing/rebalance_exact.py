"""Solves re-balancing problems exactly where the search got stuck, as far as they are small."""

from __future__ import annotations

import math
from collections.abc import Sequence

from catenary_scheduler.dispatch.placing.rebalancing.rebalance_search import Assignment


def take_best(state: Assignment, most_nodes: int) -> bool:
    """Tries every assignment that may be better; among equal ones takes the fewest moves.

    It searches depth first, the heaviest request first. If all workers have the same lines the
    objective is 2 P - D, where P is the positive part of the errors. The errors without the new
    requests only grow as requests are added, hence P does too, and a branch that exceeds the best
    so far is left out.

    Args:
        state: Holds the best assignment so far, and afterwards the best there is.
        most_nodes: Number of steps after which it gives up.

    Returns:
        False if it gave up.
    """
    tree = _Tree(state, most_nodes)
    tree.place(0, sum(max(0.0, each) for each in tree.loads))
    state.become(tree.best)
    return tree.nodes <= most_nodes


class _Tree:
    """The search of `take_best`.

    Attributes:
        loads: Errors with only the requests that were placed so far.
        best: The best assignment.
        nodes: Number of steps taken.
    """

    def __init__(self, state: Assignment, most_nodes: int) -> None:
        self._state = state
        self._most_nodes = most_nodes
        self._sum = sum(state.errors)
        self._order = sorted(range(len(state.workers)), key=lambda each: -state.weights[each][0])
        self._chosen = list(state.workers)
        self._least, self._fewest = state.objective(), state.moved()
        self.loads = list(state.errors)
        for request, worker in enumerate(state.workers):
            self.loads[worker] -= state.weights[request][worker]
        self.best = list(state.workers)
        self.nodes = 0

    def place(self, depth: int, positive: float) -> None:
        """Tries every worker for the next request; those with the most room first."""
        if depth == len(self._order):
            self._compare()
            return
        request = self._order[depth]
        weights, loads = self._state.weights[request], self.loads
        for worker in sorted(range(len(loads)), key=lambda each: loads[each]):
            self.nodes += 1
            if self.nodes > self._most_nodes:
                return
            before = loads[worker]
            after = before + weights[worker]
            above = positive + max(0.0, after) - max(0.0, before)
            if self._state.alike and 2.0 * above - self._sum > self._least + self._state.tolerance:
                continue
            loads[worker], self._chosen[request] = after, worker
            self.place(depth + 1, above)
            loads[worker] = before

    def _compare(self) -> None:
        state = self._state
        objective = sum(abs(each) for each in self.loads)
        pairs = zip(self._chosen, state.placed, strict=True)
        moved = sum(1 for at, was in pairs if at != was)
        if objective > self._least + state.tolerance:
            return
        if objective > self._least - state.tolerance and moved >= self._fewest:
            return
        state.become(self._chosen)
        if all(state.may_have(worker) for worker in range(len(self.loads))):
            self.best, self._least, self._fewest = list(self._chosen), objective, moved


def take_best_sum(state: Assignment, tokens: Sequence[float], most_sums: int) -> bool:
    """Chooses the requests of the second of two workers from all subset sums of (requests, tokens).

    Args:
        state: Two workers without constraints. Among equal assignments it takes one with the fewest
            moves.
        tokens: l_pred of every request.
        most_sums: Number of sums above which it gives up.

    Returns:
        False if it gave up.
    """
    sums: dict[tuple[int, float], tuple[int, int]] = {(0, 0.0): (0, 0)}
    for request, (its, home) in enumerate(zip(tokens, state.placed, strict=True)):
        following: dict[tuple[int, float], tuple[int, int]] = {}
        for (count, total), (moves, chosen) in sums.items():
            for key, reached in (
                ((count, total), (moves + home, chosen)),
                ((count + 1, total + its), (moves + 1 - home, chosen | 1 << request)),
            ):
                if key not in following or reached < following[key]:
                    following[key] = reached
        sums = following
        if len(sums) > most_sums:
            return False
    state.become([0] * len(tokens))
    first, second = state.errors
    best, least = 0, math.inf
    for _, chosen in sorted(sums.values()):
        here, there = first, second
        for request, weights in enumerate(state.weights):
            if chosen >> request & 1:
                here -= weights[0]
                there += weights[1]
        if abs(here) + abs(there) < least - state.tolerance:
            best, least = chosen, abs(here) + abs(there)
    state.become([best >> request & 1 for request in range(len(tokens))])
    return True
