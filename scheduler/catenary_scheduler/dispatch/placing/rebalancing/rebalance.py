"""Moves requests that have not begun to where predictions were too high (Aladdin, Algorithm 2).

Every worker has an error, the signed distance of its error line from the origin; a request that
moves takes its share along. The sum of the errors' magnitudes is minimised. If the workers have the
same lines the sum D of the signed errors never changes, so |D| is a lower bound, reached as soon as
all errors have one sign; if they have one to begin with, nothing can be gained.

The problem is NP-hard (number partitioning). So the search takes the best single move while one
helps, then the best exchange of two, until |D| is reached or nothing helps. A problem that got
stuck short of |D| is then solved exactly if it is small: two workers by subset sums (dynamic
programming), more by branch and bound. Constraints b-e must hold on every worker that gains a
request (reading R15). Requests weigh by their predicted answer and not their prompt, as in the
paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from catenary_scheduler.dispatch.placing.rebalancing.rebalance_exact import take_best, take_best_sum
from catenary_scheduler.dispatch.placing.rebalancing.rebalance_search import Assignment, Imbalance

EXACT_STEPS: Final = 20_000
"""Steps spent on proving the optimum, or finding it, where the search got stuck."""


@dataclass(frozen=True, slots=True)
class RebalanceResult:
    """Outcome of a re-balance.

    Attributes:
        assignment: The worker of every new request.
        objective: Sum of the distances of all error lines.
        objective_before: The same sum as best fit placed the requests.
        lower_bound: No assignment does better: |D| if all workers have the same lines, else 0.
        optimal: True if it is proven that none does better.
    """

    assignment: tuple[int, ...]
    objective: float
    objective_before: float
    lower_bound: float
    optimal: bool


def rebalance(problem: Imbalance, exact_steps: int = EXACT_STEPS) -> RebalanceResult:
    """Returns the workers on which the new requests should run.

    Args:
        problem: Workers, errors and new requests.
        exact_steps: Most steps of the exact part, or subset sums of two workers; 0: search only.
    """
    state = Assignment(problem)
    before = state.objective()
    bound = abs(sum(state.errors)) if state.alike else 0.0
    if state.has_both_signs():
        state.improve(bound)
    optimal = state.objective() <= bound + state.tolerance or not state.workers
    if not optimal and state.has_both_signs() and exact_steps:
        if len(problem.lines) == 2 and problem.fits is None:
            optimal = take_best_sum(state, problem.predicted_tokens, exact_steps)
        else:
            optimal = take_best(state, exact_steps)
    return RebalanceResult(tuple(state.workers), state.objective(), before, bound, optimal)
