"""Slopes of long runs: what grows is found, what merely varies is not."""

from __future__ import annotations

import random

from faults.slopes import LIMITS, MEBIBYTE, slope

MINUTE_S = 60.0


def line(
    minutes: float, value: float, per_minute: float, noise: float = 0.0
) -> list[tuple[float, float]]:
    draw = random.Random(1)
    return [
        (at, value + per_minute * at / MINUTE_S + draw.uniform(-noise, noise))
        for at in range(0, int(minutes * MINUTE_S), 2)
    ]


def test_a_leak_of_one_descriptor_a_minute_is_found() -> None:
    found = slope("agent-0", "fds", line(30, 40, 1.0))
    assert found.is_too_steep
    assert abs(found.per_minute - 1.0) < 0.01


def test_a_leak_of_memory_is_found_in_noise() -> None:
    leaking = line(30, 300 * MEBIBYTE, 1.0 * MEBIBYTE, noise=5 * MEBIBYTE)
    assert slope("gateway-0", "rss", leaking).is_too_steep


def test_noise_and_single_peaks_are_no_slope() -> None:
    calm = line(30, 300 * MEBIBYTE, 0.0, noise=5 * MEBIBYTE)
    calm[500] = (calm[500][0], 10_000 * MEBIBYTE)
    assert not slope("gateway-0", "rss", calm).is_too_steep


def test_what_fills_at_the_beginning_does_not_count() -> None:
    filling = [(at, min(at, 300.0) * MEBIBYTE) for at, _ in line(30, 0, 0)]
    assert not slope("agent-1", "rss", filling).is_too_steep


def test_a_short_run_with_one_more_thread_is_not_a_leak() -> None:
    samples = [(float(at), 20.0 if at < 40 else 21.0) for at in range(0, 60, 2)]
    assert not slope("agent-1", "threads", samples).is_too_steep


def test_a_process_that_was_seen_once_has_no_slope() -> None:
    for figure in LIMITS:
        assert slope("agent-1", figure, [(0.0, 5.0)]).per_minute == 0.0
