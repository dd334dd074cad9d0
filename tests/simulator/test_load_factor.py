from __future__ import annotations

import pytest

from catenary_simulator import SimulationOptions, max_load_factor
from catenary_simulator.options import offered_rps
from scheduling_cases.tiny_pools import two_stages


def test_the_largest_factor_is_found_from_above() -> None:
    # Both pools do 1000 requests a second; 1400 are offered at first.
    found = max_load_factor(*two_stages(), SimulationOptions({"m": 2000.0}, 0.7, 1.0))["m"]
    assert 0.4 <= found.load_factor <= 0.55
    assert found.offered_rps == found.load_factor * 2000
    assert found.attainment >= 0.99


def test_no_factor_above_the_one_asked_for_is_tried() -> None:
    assert (
        max_load_factor(*two_stages(), SimulationOptions({"m": 10.0}, 0.6, 2.0))["m"].load_factor
        == 0.6
    )


def test_a_plan_that_cannot_keep_the_slo_has_factor_zero() -> None:
    found = max_load_factor(*two_stages(slo_ms=6.0), SimulationOptions({"m": 100.0}, 0.1, 1.0))["m"]
    assert found.load_factor == 0.0
    assert found.requests == 0


@pytest.mark.parametrize(
    ("base", "load", "offered"),
    [(515.158, 1.0, 515), (515.158, 0.95, 489), (0.5, 0.5, 0.25), (100.0, 0.0, 0.0)],
)
def test_whole_requests_per_second_are_offered_as_in_the_reference(
    base: float, load: float, offered: float
) -> None:
    assert offered_rps(base, load) == offered
