"""The bound on the load of a plan: no choice of requests serves more."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_lab.scenarios.pools.fluid_bound import fluid_bound, served_share
from catenary_lab.scenarios.pools.jobs import Load, OfInstance, Plan, prepared
from catenary_simulator.load_factor import Search, search
from reference_data import reference


def most_served(arrived: list[int], work: int, window: int) -> int:
    """Tries every choice of requests, each in the order of arrival."""
    for count in range(len(arrived), 0, -1):
        for chosen in combinations(arrived, count):
            free = 0
            for moment in chosen:
                free = max(moment, free) + work
                if free > moment + window:
                    break
            else:
                return count
    return 0


@given(st.lists(st.integers(0, 20), max_size=7), st.integers(1, 6), st.integers(1, 12))
def test_no_choice_of_requests_serves_more_than_first_come_first_served(
    moments: list[int], work: int, window: int
) -> None:
    arrived = sorted(moments)
    share = served_share(arrived, float(work), window)
    assert share * len(arrived) == pytest.approx(most_served(arrived, work, window))


def test_the_load_that_is_served_is_within_the_bound() -> None:
    plan = Plan(reference("ppipe"), OfInstance("ablation/color_v2/HC2-L"), "reference")
    setting, options = prepared(plan, Load("poisson", "reference", 0.5, 1), "reservation")
    wanted = Search(0.99, 1.5, 0.05)
    bound = fluid_bound(setting, options, wanted)
    found = search(setting, options, wanted)
    assert bound.keys() == found.models.keys()
    for name, model in found.models.items():
        assert 0 < model.load_factor <= bound[name]
