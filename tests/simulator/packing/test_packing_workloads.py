"""Sessions by distributions and by traces."""

from __future__ import annotations

import numpy as np
import pytest

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import PoissonArrivals
from catenary_simulator.packing.workload import (
    LognormalLengths,
    RateStep,
    drawn_sessions,
    fitting,
    traced_sessions,
)
from catenary_simulator.placement.workload import LengthPopulation, RequestWorkload


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    drawn = LognormalLengths(695, 1).drawn(np.random.default_rng(1), 100_000)
    assert np.mean(drawn) == pytest.approx(695, rel=0.02)
    assert np.std(np.log(drawn)) == pytest.approx(1, rel=0.02)
    assert min(drawn) >= 1


def test_rates_change_in_steps() -> None:
    steps = (RateStep(20, 50), RateStep(0.0, 50), RateStep(5, 100))
    work = drawn_sessions(
        LognormalLengths(10, 0), LognormalLengths(10, 0), PoissonArrivals(), steps, 1
    )
    moments = np.array(work.arrived_ns) / NANOSECONDS_PER_SECOND
    assert work.arrived_ns == sorted(work.arrived_ns)
    assert np.sum(moments < 50) == pytest.approx(1000, rel=0.1)
    assert not np.any((moments >= 50) & (moments < 100))
    assert np.sum(moments >= 100) == pytest.approx(500, rel=0.15)


def test_a_seed_decides_everything() -> None:
    def draw(seed: int) -> RequestWorkload:
        return drawn_sessions(
            LognormalLengths(50, 1),
            LognormalLengths(50, 1),
            PoissonArrivals(),
            (RateStep(2, 50),),
            seed,
        )

    assert draw(1) == draw(1)
    assert draw(1).arrived_ns != draw(2).arrived_ns
    assert draw(1).prompts != draw(2).prompts[: len(draw(1))]


def test_a_trace_is_thinned_and_scaled() -> None:
    lengths = LengthPopulation(tuple(range(1, 11)), (5,) * 10, tuple(float(at) for at in range(10)))
    work = traced_sessions(lengths, 6.0, every=2, scale=10, first=1)
    assert work.arrived_ns == [0, 2 * NANOSECONDS_PER_SECOND, 4 * NANOSECONDS_PER_SECOND]
    assert (work.prompts, work.answers) == ([20, 40, 60], [50, 50, 50])


def test_a_trace_that_is_too_short_or_none_is_refused() -> None:
    lengths = LengthPopulation((1, 1), (1, 1), (0.0, 9.0))
    with pytest.raises(InvalidInput, match="duration_s"):
        traced_sessions(lengths, 20.0)
    with pytest.raises(InvalidInput, match="duration_s"):
        traced_sessions(lengths, 5.0, first=2)
    with pytest.raises(InvalidInput, match="lengths"):
        traced_sessions(LengthPopulation((1,), (1,)), 1.0)


def test_cutting_takes_from_the_answer_first() -> None:
    work = RequestWorkload([0, 0, 0], [50, 90, 200], [50, 20, 5])
    assert fitting(work, 100) == (RequestWorkload([0], [50], [50]), 2)
    assert fitting(work, 100, cut=True) == (
        RequestWorkload([0, 0, 0], [50, 90, 99], [50, 10, 1]),
        2,
    )
