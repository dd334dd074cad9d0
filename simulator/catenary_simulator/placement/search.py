"""The search for the smallest number of workers that reaches an attainment."""

from __future__ import annotations

from collections.abc import Callable

from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_simulator.placement.result import PlacementResult
from catenary_simulator.placement.workload import LengthPopulation

_SAFE = 0.7
"""Share of the steady state's number of workers that is surely too few, because runs begin with an
empty cluster."""
_FINE = 48
_COARSE = 4
"""Step of the search from `_FINE` workers on: a policy that needs so many is far behind anyway."""


def fewest_workers(
    serve: Callable[[int], PlacementResult], target: float, least: int, most: int
) -> PlacementResult | None:
    """Returns the run with the fewest workers that reaches the target; None if there is none.

    Attainment need not rise with the number of workers, so numbers are tried one after the other:
    the result is the smallest of them, not just one that suffices.

    Args:
        serve: Function that runs the same workload on a number of workers.
        target: Share of the requests that must meet their objectives.
        least: The first number to try.
        most: The last number to try.
    """
    workers = max(1, least)
    while workers <= most:
        found = serve(workers)
        if not found.decided and found.attainment >= target:
            return found
        workers += 1 if workers < _FINE else _COARSE
    return None


def least_workers(
    lines: LatencyLines, objectives: TokenObjectives, lengths: LengthPopulation, rate_per_s: float
) -> int:
    """Returns a number of workers that is surely not enough, or 1.

    In the steady state as many tokens are decoded as are asked for, in batches no larger than eq. 4
    allows at the mean context if there were no prompts to prefill.
    """
    answers = sum(lengths.answers)
    over_time = sum(
        answer * (prompt + answer / 2)
        for prompt, answer in zip(lengths.prompts, lengths.answers, strict=True)
    )
    context = over_time / answers
    per_session = lines.decode_context_token_ns * context + lines.decode_session_ns
    if not objectives.per_token_ns or per_session <= 0:
        return 1
    batch = max(1.0, (objectives.per_token_ns - lines.decode_ns) / per_session)
    tokens_per_ns = rate_per_s * answers / len(lengths.answers) / 1e9
    return max(1, int(_SAFE * tokens_per_ns * objectives.per_token_ns / batch))
