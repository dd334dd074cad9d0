"""The smallest number of workers that reaches an attainment."""

from __future__ import annotations

from collections.abc import Callable

from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_simulator.placement.result import PlacementResult
from catenary_simulator.placement.workload import LengthPopulation

_SAFE = 0.7
"""Share of the steady state's workers that is surely too few: runs begin with an empty cluster."""
_FINE = 48
_COARSE = 4
"""From `_FINE` workers on, only every fourth number is tried: who needs so many is far off."""


def fewest_workers(
    serve: Callable[[int], PlacementResult], target: float, least: int, most: int
) -> PlacementResult | None:
    """Returns the run with the fewest workers that reaches the target; None if there is none.

    Attainment need not rise with the number of workers: numbers are tried one after the other, so
    that what is returned is the smallest, not just one that will do.

    Args:
        serve: Runs the same workload on so many workers.
        target: Share of the requests that must meet their objectives.
        least: Where to begin.
        most: Where to give up.
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

    In the steady state as many tokens are decoded as are asked for, by batches no larger than
    eq. 4 allows at the mean context, were there no prompts to run.
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
