"""Improves an assignment of new requests by moves and exchanges (Aladdin, Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from catenary_scheduler.dispatch.placing.rebalancing.error_lines import WorkerErrors, error_line
from catenary_services.domain.latency import LatencyLines

Fits = Callable[[int, Sequence[int]], bool]
"""True if constraints b-e hold on a worker with these of the new requests (by their indices)."""

_RELATIVE: Final = 1e-12
"""Differences below this share of all errors are rounding."""


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Workers with errors, and requests just placed on them.

    Attributes:
        lines: Latency lines of every worker.
        errors: Errors of every worker since the last re-balance.
        predicted_tokens: l_pred of every new request.
        placed: The worker of every new request, as best fit chose it.
        fits: Tells whether a worker may have some requests; None: any worker may have any.
    """

    lines: Sequence[LatencyLines]
    errors: Sequence[WorkerErrors]
    predicted_tokens: Sequence[float]
    placed: Sequence[int]
    fits: Fits | None = None


class Assignment:
    """An assignment of requests to workers, changed step by step.

    Attributes:
        workers: The worker of every request.
        placed: The worker that best fit chose for it.
        errors: Signed distance of every worker's error line; changes with the assignment.
        weights: The amount that a request adds to the error of each worker.
        alike: True if all workers have the same lines, so the sum of their errors never changes.
        tolerance: Gains below this are rounding.
    """

    def __init__(self, problem: Imbalance) -> None:
        self.placed = problem.placed
        self.alike = all(each == problem.lines[0] for each in problem.lines)
        self._fits = problem.fits
        self.workers = list(problem.placed)
        self.errors: list[float] = []
        self.weights: list[list[float]] = [[] for _ in problem.placed]
        for lines, errors in zip(problem.lines, problem.errors, strict=True):
            line = error_line(lines, errors)
            slope = math.hypot(line.alpha, line.beta) or 1.0
            self.errors.append(-line.constant / slope)
            for weights, tokens in zip(self.weights, problem.predicted_tokens, strict=True):
                weights.append((line.alpha * tokens + line.beta) / slope)
        self.tolerance = _RELATIVE * (1.0 + self.objective())

    def objective(self) -> float:
        """Returns the sum of all distances."""
        return sum(abs(each) for each in self.errors)

    def has_both_signs(self) -> bool:
        """True if some worker has more load than was thought, and another has less."""
        return any(each > 0 for each in self.errors) and any(each < 0 for each in self.errors)

    def improve(self, bound: float) -> None:
        """Takes the best single move while one helps, else the best exchange, until none does.

        Every step lowers the objective, so the search ends.
        """
        while self.objective() > bound + self.tolerance:
            if not self._take_first(self._moves()) and not self._take_first(self._exchanges()):
                return

    def _moves(self) -> list[tuple[float, int, int, int]]:
        """Returns (gain, request, worker it goes to, -1) of the moves that help."""
        errors, found = self.errors, []
        for request, (source, weights) in enumerate(zip(self.workers, self.weights, strict=True)):
            freed = abs(errors[source]) - abs(errors[source] - weights[source])
            for target, error in enumerate(errors):
                if target != source:
                    gain = freed + abs(error) - abs(error + weights[target])
                    if gain > self.tolerance:
                        found.append((gain, request, target, -1))
        return found

    def _exchanges(self) -> list[tuple[float, int, int, int]]:
        """Returns (gain, request, its new worker, the request it changes places with)."""
        errors, workers, found = self.errors, self.workers, []
        for request, source in enumerate(workers):
            mine = self.weights[request]
            for other in range(request + 1, len(workers)):
                target = workers[other]
                if target == source:
                    continue
                its = self.weights[other]
                here, there = errors[source], errors[target]
                after = abs(here - mine[source] + its[source])
                after += abs(there - its[target] + mine[target])
                gain = abs(here) + abs(there) - after
                if gain > self.tolerance:
                    found.append((gain, request, target, other))
        return found

    def _take_first(self, steps: list[tuple[float, int, int, int]]) -> bool:
        """Takes the best step that is allowed; False if there is none."""
        if not steps:
            return False
        if self._fits is None:
            steps = [max(steps)]
        for _, request, target, other in sorted(steps, reverse=True):
            source = self.workers[request]
            self.put(request, target)
            if other >= 0:
                self.put(other, source)
            if self.may_have(target) and (other < 0 or self.may_have(source)):
                return True
            self.put(request, source)
            if other >= 0:
                self.put(other, target)
        return False

    def put(self, request: int, target: int) -> None:
        source, weights = self.workers[request], self.weights[request]
        self.errors[source] -= weights[source]
        self.errors[target] += weights[target]
        self.workers[request] = target

    def may_have(self, worker: int) -> bool:
        """True if b-e hold on a worker, or it gained nothing since best fit."""
        fits, placed = self._fits, self.placed
        if fits is None:
            return True
        here = [request for request, at in enumerate(self.workers) if at == worker]
        return all(placed[request] == worker for request in here) or fits(worker, here)

    def moved(self) -> int:
        """Returns how many requests are not where best fit placed them."""
        return sum(1 for at, was in zip(self.workers, self.placed, strict=True) if at != was)

    def become(self, workers: Sequence[int]) -> None:
        """Moves every request to its worker in `workers`."""
        for request, target in enumerate(workers):
            if self.workers[request] != target:
                self.put(request, target)
