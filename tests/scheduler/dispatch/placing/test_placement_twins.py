"""Best fit against the mixed-integer programme of section 4.1."""

from __future__ import annotations

import pytest

from benchmarks.placement.placement_twins import (
    PlacementCase,
    fewest_workers,
    opened_by_best_fit,
    random_placement,
)
from catenary_scheduler.dispatch.placing.constraints import examine

SINGLE = 320
TOGETHER = 24


def test_a_single_request_is_placed_exactly_when_the_programme_is_feasible() -> None:
    outcomes: dict[int | None, int] = {}
    for seed in range(SINGLE):
        case = random_placement(seed)
        least = fewest_workers(case)
        assert opened_by_best_fit(case) == least, seed
        outcomes[least] = outcomes.get(least, 0) + 1
    assert min(outcomes[each] for each in (0, 1, None)) > SINGLE // 10, outcomes


def test_every_constraint_decides_some_of_these_cases() -> None:
    alone = [0, 0, 0, 0]
    for seed in range(SINGLE):
        case = random_placement(seed)
        for jobs in case.workers:
            verdict = examine(case.lines, case.limits, jobs, case.arriving[0])
            bounds = (verdict.context, verdict.prompts, verdict.slack, verdict.cache)
            failed = [at for at, bound in enumerate(bounds) if not bound.ok]
            if len(failed) == 1:
                alone[failed[0]] += 1
    assert min(alone) > 5, alone


def _together(seeds: range) -> tuple[int, int]:
    """Returns how many workers best fit and the programme open for requests that come at once."""
    by_best_fit = at_least = 0
    for seed in seeds:
        case = random_placement(seed, arriving=2 + seed % 3)
        if case.lines.decode_lone_ns > case.limits.per_token_ns:
            continue  # not even a lone session keeps T_dec (reading R2)
        least, opened = fewest_workers(case), opened_by_best_fit(case)
        assert (opened is None) == (least is None), seed
        if opened is not None and least is not None:
            assert opened >= least, seed
            by_best_fit, at_least = by_best_fit + opened, at_least + least
    return by_best_fit, at_least


def test_requests_that_come_together_take_few_more_workers_than_the_optimum() -> None:
    opened, least = _together(range(1000, 1000 + TOGETHER))
    assert 0 < least <= opened <= 1.25 * least


@pytest.mark.system
def test_many_batches_take_few_more_workers_than_the_optimum() -> None:
    opened, least = _together(range(1000, 1400))
    assert 0 < least <= opened <= 1.1 * least


def test_the_programme_says_no_to_what_cannot_be() -> None:
    case = random_placement(1)
    limits = type(case.limits)(1, case.limits.per_token_ns, case.limits.cache_capacity)
    assert fewest_workers(PlacementCase(case.lines, limits, case.workers, case.arriving)) is None
