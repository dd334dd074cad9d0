from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import (
    ArrivalProcess,
    GammaArrivals,
    OnOffArrivals,
    PoissonArrivals,
    merged,
    parse_arrivals,
)


def drawn(arrivals: ArrivalProcess, rate: float, duration: float, seed: int = 1) -> np.ndarray:
    return arrivals.moments(rate, duration, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (PoissonArrivals(), 1.0),
        (GammaArrivals(1.0), 1.0),
        (GammaArrivals(2.0), 2.0),
        (GammaArrivals(0.5), 0.5),
    ],
)
def test_gaps_have_the_mean_and_the_variation_asked_for(
    arrivals: ArrivalProcess, cv: float
) -> None:
    moments = drawn(arrivals, 200.0, 300.0)
    gaps = np.diff(moments)
    assert len(moments) == pytest.approx(60_000, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert moments[0] >= 0
    assert moments[-1] < 300.0


def test_on_and_off_have_the_mean_rate_together_and_silence_in_between() -> None:
    moments = drawn(OnOffArrivals(0.5, 1.5), 100.0, 2000.0)
    assert len(moments) == pytest.approx(200_000, rel=0.1)
    # A silence of 0.1 s does not occur while it is on, at 400 a second.
    silent = np.diff(moments)
    assert silent[silent > 0.1].sum() / 2000.0 == pytest.approx(0.75 * np.exp(-0.1 / 1.5), rel=0.1)


def test_arrivals_depend_on_the_seed_and_the_model_only() -> None:
    one = merged([(PoissonArrivals(), 100.0), (PoissonArrivals(), 50.0)], 10.0, 7)
    assert merged([(PoissonArrivals(), 100.0), (PoissonArrivals(), 50.0)], 10.0, 7) == one
    assert merged([(PoissonArrivals(), 100.0), (PoissonArrivals(), 50.0)], 10.0, 8) != one
    moments, owners = one
    assert moments == sorted(moments)
    alone, _ = merged([(PoissonArrivals(), 0.0), (PoissonArrivals(), 50.0)], 10.0, 7)
    assert alone == [moment for moment, owner in zip(moments, owners, strict=True) if owner == 1]


def test_recorded_arrivals_keep_their_gaps_at_another_rate(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("seconds\n100\n101\n101.5\n105\n")
    moments = drawn(parse_arrivals(str(file)), 3 / 5, 1000.0)
    assert len(moments) == pytest.approx(600, abs=3)
    assert set(np.round(np.diff(moments), 6)) == {1.0, 0.5, 3.5}
    twice = drawn(parse_arrivals(str(file)), 6 / 5, 1000.0)
    assert set(np.round(np.diff(twice), 6)) == {0.5, 0.25, 1.75}


def test_time_stamps_are_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9799600,4808\n"
        "2023-11-16 18:17:04.4799600,3180\n2023-11-16 18:17:05.9799600,1\n"
    )
    gaps = np.diff(drawn(parse_arrivals(str(file)), 1.0, 100.0))
    assert set(np.round(gaps, 4)) == {0.5, 1.5}


def test_recorded_rates_keep_their_shape_at_another_mean(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("seconds,rps\n0,10\n10,30\n20,0\n")
    moments = drawn(parse_arrivals(str(file)), 400.0, 60.0)
    # Two laps of 30 s; rates 300, 900 and 0.
    counts = np.histogram(moments, bins=np.arange(0, 70, 10))[0]
    assert counts == pytest.approx([3000, 9000, 0, 3000, 9000, 0], rel=0.1)


@pytest.mark.parametrize(
    "text", ["gamma", "gamma:0", "gamma:x", "onoff:1", "onoff:1:-1", "poisson:2", "nowhere.csv"]
)
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_arrivals(text)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "time\n1\n2\n",
        "seconds\n1\n",
        "seconds\n2\n1\n",
        "seconds\n1\n1\n",
        "seconds\n1\nx\n",
        "seconds,rps\n0,0\n1,0\n",
        "seconds,rps\n0,-1\n1,5\n",
        "seconds\n1\nnan\n",
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(InvalidInput):
        parse_arrivals(str(file))
