"""Whole runs around the real dispatcher: nothing lost, nothing twice, the same again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_lab.policies import seeded
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import PoissonArrivals
from catenary_simulator.placement.loop import ReportDelays
from catenary_simulator.placement.result import PlacementResult
from catenary_simulator.placement.search import fewest_workers, least_workers
from catenary_simulator.placement.serve import PlacementRun, WorkerKind, serve_placement
from catenary_simulator.placement.workload import (
    LengthPopulation,
    RequestWorkload,
    drawn_workload,
    lognormal_lengths,
    read_lengths,
    replayed_workload,
    stepped_workload,
)

MS = 1_000_000
LINES = LatencyLines(0.12 * MS, 14.0 * MS, 450.0, 0.075 * MS, 22.5 * MS, 23.0 * MS)
OBJECTIVES = TokenObjectives(600 * MS, 30 * MS)
POLICIES = ["fewest-sessions", "power-of-two", "least-loaded", "slo"]
LENGTHS = lognormal_lengths((80.0, 1.0), (60.0, 0.8), 400, seed=1)


def kind(cache_tokens: float = 60_000.0, *, chunk: int = 0, split: bool = False) -> WorkerKind:
    lines = LatencyLines(
        LINES.prefill_token_ns,
        LINES.prefill_ns,
        LINES.decode_context_token_ns,
        LINES.decode_session_ns,
        LINES.decode_ns,
        LINES.decode_lone_ns,
        prefill_chunk_tokens=chunk,
    )
    return WorkerKind(lines, cache_tokens, split)


def run(policy: str = "fewest-sessions", workers: int = 3, **changes: object) -> PlacementRun:
    return PlacementRun(
        checked=True,
        **{
            "kind": kind(),
            "workers": workers,
            "policy": seeded(policy, 5),
            "objectives": OBJECTIVES,
            **changes,
        },
    )


def work(rate: float = 6.0, seconds: float = 8.0, seed: int = 2) -> RequestWorkload:
    return drawn_workload(LENGTHS, PoissonArrivals(), rate, seconds, seed)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", ["whole", "chunked", "split"])
def test_every_request_ends_once_and_first_tokens_come_first(policy: str, shape: str) -> None:
    workload = work()
    engine = kind(chunk=64 if shape == "chunked" else 0, split=shape == "split")
    found = serve_placement(run(policy, kind=engine), workload)
    assert found.requests == len(workload)
    assert len(found.first_token_ms) + found.rejected == len(workload)
    assert found.rejected == 0
    longer = sum(answer > 1 for answer in workload.answers)
    assert len(found.per_token_ms) == longer
    assert 0.0 < found.utilisation <= 1.0
    assert found.workers_peak <= found.workers == 3
    assert 0.0 < found.workers_mean <= 3.0


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_results(policy: str) -> None:
    first, second = (serve_placement(run(policy), work()) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert np.array_equal(first.per_token_ms, second.per_token_ms)


def test_another_seed_of_the_workload_gives_other_requests() -> None:
    assert work(seed=2) == work(seed=2)
    assert work(seed=2) != work(seed=3)


def test_one_worker_alone_is_as_fast_as_its_lines() -> None:
    workload = RequestWorkload([0], [100], [11])
    found = serve_placement(run(workers=1, delays=ReportDelays(0, 0, 0)), workload)
    assert found.first_token_ms.tolist() == [pytest.approx(0.12 * 100 + 14.0)]
    assert found.per_token_ms.tolist() == [pytest.approx(23.0)]


def test_the_way_to_the_worker_counts_in_the_time_to_the_first_token() -> None:
    workload = RequestWorkload([0], [100], [11])
    found = serve_placement(run(workers=1, delays=ReportDelays(start_ns=7 * MS)), workload)
    assert found.first_token_ms.tolist() == [pytest.approx(0.12 * 100 + 14.0 + 7.0)]


def test_a_single_token_has_no_time_per_token() -> None:
    found = serve_placement(run(workers=1), RequestWorkload([0, 5], [10, 10], [1, 1]))
    assert len(found.per_token_ms) == 0
    assert found.attainment == 1.0


def test_missed_objectives_are_counted_strictly() -> None:
    # 23 ms per token alone; just below and just above what is allowed.
    for allowed_ms, attained in ((23.0, 1), (22.999, 0)):
        objectives = TokenObjectives(600 * MS, round(allowed_ms * MS))
        found = serve_placement(
            run(workers=1, objectives=objectives), RequestWorkload([0], [10], [9])
        )
        assert (found.attained, found.per_token_late) == (attained, 1 - attained)


def test_a_request_larger_than_any_cache_is_a_miss_and_not_a_stop() -> None:
    workload = RequestWorkload([0, 1000], [500, 10], [10, 10])
    found = serve_placement(run(workers=1, kind=kind(cache_tokens=300.0)), workload)
    assert (found.rejected, found.attained, found.requests) == (1, 1, 2)


def test_small_caches_preempt_and_still_end_everything() -> None:
    found = serve_placement(run(kind=kind(cache_tokens=900.0)), work(rate=8.0))
    assert found.preemptions > 0
    assert len(found.first_token_ms) + found.rejected == found.requests


def test_a_run_ends_early_when_too_many_have_missed() -> None:
    whole = serve_placement(run(workers=1), work(rate=20.0))
    short = serve_placement(run(workers=1, may_miss=3), work(rate=20.0))
    assert whole.attainment < 0.9
    assert short.decided
    assert short.events < whole.events


def test_decisions_are_timed_by_the_clock_that_is_given() -> None:
    moments = iter(range(0, 10**9, 7))
    found = serve_placement(run(stopwatch=lambda: next(moments)), work())
    assert len(found.decision_ns) == found.requests
    assert set(found.decision_ns) == {7}


# The search


def found_with(workers: int, attained: int) -> PlacementResult:
    empty = np.array([])
    return PlacementResult(100, attained, 0, empty, empty, 0, 0, workers, 0, 0.0, 0.0, 0, 0, 0.0)


def test_the_search_finds_the_smallest_although_more_may_be_worse() -> None:
    attained = {4: 90, 5: 99, 6: 97, 7: 100}
    found = fewest_workers(lambda n: found_with(n, attained[n]), 0.99, 4, 7)
    assert found is not None
    assert found.workers == 5
    assert fewest_workers(lambda n: found_with(n, 98), 0.99, 1, 60) is None


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.5, 8.0), seed=st.integers(0, 50))
def test_fewer_workers_than_the_bound_never_suffice(rate: float, seed: int) -> None:
    least = least_workers(LINES, OBJECTIVES, LENGTHS, rate)
    workload = drawn_workload(LENGTHS, PoissonArrivals(), rate, 20.0, seed)
    if least > 1 and len(workload):
        assert serve_placement(run(workers=least - 1), workload).attainment < 0.99


# Workloads


def test_halves_share_nothing_and_leave_nothing_out() -> None:
    lengths = LengthPopulation((1, 2, 3, 4, 5), (9, 8, 7, 6, 5))
    learned, served = lengths.halves()
    assert learned == LengthPopulation((1, 3, 5), (9, 7, 5))
    assert served == LengthPopulation((2, 4), (8, 6))
    assert lengths.within(9) == LengthPopulation((), ())
    assert lengths.within(10) == lengths


def test_a_trace_is_replayed_in_its_order_at_the_rate_asked_for() -> None:
    lengths = LengthPopulation(
        tuple(range(1, 2001)), (1,) * 2000, tuple(n / 3 for n in range(2000))
    )
    workload = replayed_workload(lengths, 10.0, 60.0, seed=1)
    assert 590 <= len(workload) <= 601
    assert workload.prompts == list(range(workload.prompts[0], workload.prompts[-1] + 1))
    with pytest.raises(InvalidInput, match="lasts"):
        replayed_workload(lengths, 10.0, 6000.0, seed=1)
    with pytest.raises(InvalidInput, match="moments"):
        replayed_workload(LENGTHS, 10.0, 60.0, seed=1)


def test_steps_of_a_rate_follow_each_other() -> None:
    workload = stepped_workload(LENGTHS, PoissonArrivals(), [5.0, 0.0, 50.0], 30.0, seed=1)
    seconds = np.array(workload.arrived_ns) / 1e9
    assert np.all(np.diff(seconds) >= 0)
    counts = [
        int(np.count_nonzero((seconds >= 10 * n) & (seconds < 10 * n + 10))) for n in (0, 1, 2)
    ]
    assert counts[1] == 0
    assert 25 < counts[0] < 80
    assert 400 < counts[2] < 600


def test_a_file_without_the_columns_is_refused(tmp_path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInput, match="l_in"):
        read_lengths(path)
    path.write_text("l_in,l_out\n5,7\n0,3\n")
    assert read_lengths(path) == LengthPopulation((5, 1), (7, 3))
