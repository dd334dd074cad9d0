"""Lines from profiles: exact data come back, floors are found, intervals hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning.latency import (
    CacheSample,
    DecodeSample,
    ErrorWindow,
    PrefillSample,
    fit_cache,
    fit_decode,
    fit_prefill,
    lines_of,
)
from catenary_scheduler.planning.latency.intervals import around, t_quantile
from catenary_services.errors import InvalidInput

coefficients = st.floats(0, 1e8).map(lambda x: x if x > 1 else 0.0)


@settings(max_examples=50, deadline=None)
@given(coefficients, coefficients)
def test_a_line_comes_back_from_its_own_points(k1: float, c1: float) -> None:
    if k1 + c1 == 0:
        return
    samples = [PrefillSample(n, k1 * n + c1) for n in (8, 16, 64, 256, 1024)]
    fit = fit_prefill(samples)
    for each in samples:
        assert fit.predict((each.tokens, 1)) == pytest.approx(each.ns, rel=1e-6)


def test_a_plane_comes_back_and_lone_steps_stand_apart() -> None:
    samples = [
        DecodeSample(b, b * depth, 4_000.0 * b * depth + 7e6 * b + 50e6)
        for b in (2, 3, 8)
        for depth in (10, 500)
    ]
    fit, lone = fit_decode([*samples, DecodeSample(1, 100, 52e6), DecodeSample(1, 900, 54e6)])
    assert fit.coefficients == pytest.approx([4_000.0, 7e6, 50e6], rel=1e-6)
    assert lone == 53e6


def test_noise_never_makes_a_coefficient_negative() -> None:
    random = np.random.default_rng(3)
    for _ in range(100):
        noisy = random.lognormal(0, 0.3, 6)
        samples = [
            DecodeSample(b, b * depth, float(50e6 * noise))
            for (b, depth), noise in zip(
                [(2, 1), (4, 1), (8, 1), (2, 300), (4, 300), (8, 300)], noisy, strict=True
            )
        ]
        fit, _ = fit_decode(samples)
        assert np.all(fit.coefficients >= 0)


def test_short_prompts_get_a_flat_floor() -> None:
    """Pitfall 6: below some 128 tokens a prompt takes what reading the weights takes."""
    samples = [PrefillSample(n, max(30e6, 0.2e6 * n + 5e6)) for n in (2, 8, 32, 64, 256, 512, 1024)]
    fit = fit_prefill(samples)
    assert fit.floor == pytest.approx(30e6, rel=1e-6)
    assert fit.coefficients == pytest.approx([0.2e6, 5e6], rel=1e-6)
    lines = lines_of(fit, fit_decode([DecodeSample(2, 2, 1e6)]))
    assert [lines.prefill(each.tokens) for each in samples] == pytest.approx(
        [each.ns for each in samples]
    )


def test_a_plain_line_gets_no_floor() -> None:
    fit = fit_prefill([PrefillSample(n, 2e6 * n + 10e6) for n in (2, 8, 32, 128)])
    assert fit.floor == 0.0


def test_relative_errors_count_not_absolute_ones() -> None:
    """One long prompt 10 % too slow must not spoil the prediction of all the short ones."""
    samples = [PrefillSample(n, 1e6 * n) for n in (10, 20, 40, 80)]
    fit = fit_prefill([*samples, PrefillSample(4000, 4400e6)])
    for each in samples:
        assert fit.predict((each.tokens, 1)) == pytest.approx(each.ns, rel=0.11)


def test_a_cache_line_has_bytes_per_token_and_per_session() -> None:
    fit = fit_cache([CacheSample(n, 4096.0 * n + 512) for n in (1, 10, 100)])
    assert fit.coefficients == pytest.approx([4096.0, 512.0])


def test_nothing_cannot_be_fitted() -> None:
    with pytest.raises(InvalidInput):
        fit_prefill([])
    with pytest.raises(InvalidInput):
        fit_decode([DecodeSample(1, 5, 3.0)])
    with pytest.raises(InvalidInput):
        fit_prefill([PrefillSample(4, 0.0)])


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_intervals_hold_their_share(share: float) -> None:
    """Coverage over 400 fits of 12 noisy points each, one new point per fit."""
    random = np.random.default_rng(11)
    inside, rounds = 0, 400
    for _ in range(rounds):
        samples = [
            DecodeSample(b, b * d, (3e3 * b * d + 6e6 * b + 40e6) * random.normal(1, 0.03))
            for b in (2, 4, 8, 16)
            for d in (20, 200, 600)
        ]
        fit, _ = fit_decode(samples)
        b, d = int(random.integers(2, 16)), int(random.integers(20, 600))
        measured = (3e3 * b * d + 6e6 * b + 40e6) * random.normal(1, 0.03)
        inside += measured in fit.interval((b * d, b, 1), share)
    assert inside / rounds == pytest.approx(share, abs=0.05)


def test_without_spare_samples_an_interval_is_everything() -> None:
    fit = fit_prefill([PrefillSample(10, 100.0), PrefillSample(20, 150.0)])
    assert fit.interval((15, 1)).high == math.inf


@pytest.mark.parametrize(
    ("degrees", "share", "expected"),
    [(1, 0.9, 6.314), (2, 0.95, 4.303), (5, 0.95, 2.571), (10, 0.9, 1.812), (1e6, 0.95, 1.960)],
)
def test_quantiles_of_students_t(degrees: float, share: float, expected: float) -> None:
    assert t_quantile(degrees, share) == pytest.approx(expected, rel=0.01)


def test_a_lower_bound_is_never_negative() -> None:
    assert around(10.0, 5.0, 0.0, 3, 0.95).low == 0.0


def test_errors_are_relative_and_of_the_latest_only() -> None:
    window = ErrorWindow(size=2)
    assert (window.mean, window.maximum) == (-1.0, -1.0)
    for measured in (500.0, 110.0, 80.0):
        window.add(measured, 100.0)
    window.add(5.0, 0.0)  # predicted to take no time: tells nothing
    assert window.mean == pytest.approx(0.15)
    assert window.maximum == pytest.approx(0.2)
