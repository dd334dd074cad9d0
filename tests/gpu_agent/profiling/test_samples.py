from __future__ import annotations

from catenary_agent.profiling.samples import SHARED_SPAN_NS, busy_window, summarise

MS = 1_000_000


def runs(start: int, duration: int, count: int, pause: int = 0) -> list[tuple[int, int]]:
    step = duration + pause
    return [(start + i * step, start + i * step + duration) for i in range(count)]


def test_the_window_begins_with_the_last_to_start_and_ends_with_the_first_to_stop() -> None:
    assert busy_window([[(0, 5), (5, 90)], [(7, 9), (20, 40)]]) == (7, 40)


def test_runs_while_a_sibling_rests_do_not_count() -> None:
    alone, shared = runs(0, MS, 50), runs(50 * MS, 4 * MS, 30)
    sibling = runs(50 * MS, 4 * MS, 30)
    summary = summarise([alone + shared, sibling])
    assert summary is not None
    assert (summary.p50_ns, summary.p95_ns, summary.counted) == (4 * MS, 4 * MS, 60)


def test_virtual_gpus_that_never_ran_together_measure_nothing() -> None:
    assert summarise([runs(0, MS, 5), runs(10 * MS, MS, 5)]) is None


def test_one_virtual_gpu_alone_has_the_median_of_its_runs() -> None:
    times = [5, 1, 9, 2, 3]
    ends = [sum(times[: i + 1]) for i in range(5)]
    summary = summarise([[(e - t, e) for t, e in zip(times, ends, strict=True)]])
    assert summary is not None
    assert (summary.p50_ns, summary.counted) == (3, 5)


def test_waiting_for_time_slices_is_part_of_the_time_of_short_runs() -> None:
    """0.1 ms runs in slices of 3 ms: half the throughput, though nine in ten runs take 0.1 ms."""
    slices = [run for turn in range(60) for run in runs(turn * 6 * MS, MS // 10, 30)]
    other = [(a + 3 * MS, b + 3 * MS) for a, b in slices]
    summary = summarise([slices, other])
    assert summary is not None
    assert summary.p50_ns > 1.6 * MS // 10
    assert summary.p95_ns >= summary.p50_ns


def test_p95_is_that_of_single_runs() -> None:
    steady = runs(0, MS, 500)
    slow = runs(500 * MS, 10 * MS, 30)
    both = steady + slow
    summary = summarise([both, list(both)])
    assert summary is not None
    assert summary.p95_ns == 10 * MS
    assert summary.p50_ns == MS


def test_runs_shorter_than_a_span_altogether_are_one_group() -> None:
    few = runs(0, MS, 3, pause=MS)
    assert 5 * MS < SHARED_SPAN_NS
    summary = summarise([few, list(few)])
    assert summary is not None
    assert summary.p50_ns == round(5 * MS / 3)
