"""Theorem 3.7 against exact Markov chains, M/M/C and Appendix A.3."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_lab.chains.exact import one_chain_response_s, two_chains_response_s
from catenary_scheduler.planning.chains.bounds import prefix_bounds, response_bound, response_bounds
from catenary_scheduler.planning.chains.early import bounded_response_s
from catenary_services.errors import InvalidInput
from scheduling_cases.literal_chains import exact_response_s

RATES = st.floats(0.05, 5.0)
LOADS = st.floats(0.01, 0.99)
CHAINS = st.lists(st.tuples(st.integers(1, 4), RATES), min_size=1, max_size=4)


@settings(deadline=None)
@given(chains=CHAINS, load=LOADS)
def test_bounds_enclose_the_exact_response(chains: list[tuple[int, float]], load: float) -> None:
    chains = sorted(chains, key=lambda chain: -chain[1])
    capacities, rates = [c for c, _ in chains], [mu for _, mu in chains]
    arrivals = load * sum(c * mu for c, mu in chains)
    bounds = response_bounds(capacities, rates, arrivals)
    assert bounds is not None
    exact = exact_response_s(capacities, rates, arrivals)
    assert bounds.response_lower_s <= exact * (1 + 1e-8)
    assert exact <= bounds.response_upper_s * (1 + 1e-8)
    assert bounds.load == pytest.approx(load)


@given(c1=st.integers(1, 5), c2=st.integers(1, 5), mu=st.integers(1, 30), load=st.integers(1, 99))
def test_two_chains_equal_the_markov_chain(c1: int, c2: int, mu: int, load: int) -> None:
    rates = (Fraction(3), Fraction(mu, 10))
    arrivals = (c1 * rates[0] + c2 * rates[1]) * Fraction(load, 100)
    response = two_chains_response_s((c1, c2), rates, arrivals)
    twin = exact_response_s((c1, c2), [float(rate) for rate in rates], float(arrivals))
    assert float(response) == pytest.approx(twin, rel=1e-8)
    bounds = response_bounds((c1, c2), [float(rate) for rate in rates], float(arrivals))
    assert bounds is not None
    assert bounds.response_lower_s <= response * (1 + Fraction(1, 10**9))
    assert response <= bounds.response_upper_s * (1 + 1e-9)


@given(capacity=st.integers(1, 300), rate=RATES, load=LOADS, parts=st.integers(1, 3))
def test_one_chain_is_m_m_c_by_the_erlang_formula(
    capacity: int, rate: float, load: float, parts: int
) -> None:
    total = parts * capacity
    arrivals = load * total * rate
    offered = arrivals / rate
    blocking = 1.0  # Erlang B by its recursion, then C
    for servers in range(1, total + 1):
        blocking = offered * blocking / (servers + offered * blocking)
    waits = blocking / (1 - load * (1 - blocking))
    expected = 1 / rate + waits / (total * rate - arrivals)
    assert one_chain_response_s(total, rate, arrivals) == pytest.approx(expected, rel=1e-9)
    # Equally fast chains leave nothing between the bounds.
    bounds = response_bounds([capacity] * parts, [rate] * parts, arrivals)
    assert bounds is not None
    assert bounds.response_lower_s == pytest.approx(expected, rel=1e-9)
    assert bounds.response_upper_s == pytest.approx(expected, rel=1e-9)


def test_a_published_m_m_c_value() -> None:
    # M/M/2 at load 1/2: E[T] = (1/mu) / (1 - rho^2).
    assert one_chain_response_s(2, 1.0, 1.0) == pytest.approx(1 / 0.75)


def test_many_job_servers_neither_overflow_nor_lose_digits() -> None:
    capacities, rates = [9_500, 9_500, 9_500], [0.09, 0.07, 0.05]
    arrivals = 0.97 * sum(c * mu for c, mu in zip(capacities, rates, strict=True))
    bounds = response_bounds(capacities, rates, arrivals)
    assert bounds is not None
    # The same sums in long doubles, from scratch.
    for order, value in ((1, bounds.response_lower_s), (-1, bounds.response_upper_s)):
        deaths = np.cumsum(np.repeat(np.array(rates[::order], dtype=np.longdouble), capacities))
        logs = np.cumsum(np.log(np.longdouble(arrivals) / deaths))
        weights = np.exp(np.concatenate(([np.longdouble(0)], logs)) - logs.max())
        rho = np.longdouble(arrivals) / deaths[-1]
        tail = weights[-1] / (1 - rho)
        mean = np.arange(len(deaths)) @ weights[:-1]
        mean += weights[-1] * rho / (1 - rho) ** 2 + len(deaths) * tail
        expected = float(mean / (weights[:-1].sum() + tail) / arrivals)
        assert value == pytest.approx(expected, rel=1e-10)
        assert math.isfinite(value)


def test_order_of_the_chains_does_not_matter_and_one_bound_equals_both() -> None:
    both = response_bounds([2, 3, 1], [0.2, 1.0, 0.5], 2.0)
    assert both == response_bounds([1, 2, 3], [0.5, 0.2, 1.0], 2.0)
    assert both is not None
    assert response_bound([2, 3, 1], [0.2, 1.0, 0.5], 2.0, upper=False) == both.response_lower_s
    assert response_bound([2, 3, 1], [0.2, 1.0, 0.5], 2.0, upper=True) == both.response_upper_s


def test_too_high_a_load_and_no_chain_have_no_bounds() -> None:
    assert response_bounds([2], [0.5], 1.0) is None
    assert response_bounds([], [], 1.0) is None
    assert response_bound([2], [0.5], 1.0, upper=True) is None
    with pytest.raises(InvalidInput):
        one_chain_response_s(2, 0.5, 1.0)
    with pytest.raises(InvalidInput):
        two_chains_response_s((1, 1), (Fraction(1), Fraction(1)), Fraction(2))
    with pytest.raises(InvalidInput):
        two_chains_response_s((1, 1), (Fraction(1), Fraction(2)), Fraction(1))


@settings(deadline=None)
@given(chains=CHAINS, more=CHAINS, load=LOADS)
def test_a_prefix_of_the_chains_bounds_the_lower_bound(
    chains: list[tuple[int, float]], more: list[tuple[int, float]], load: float
) -> None:
    everything = sorted([*chains, *more], key=lambda chain: -chain[1])
    capacities, rates = [c for c, _ in everything], [mu for _, mu in everything]
    arrivals = load * sum(c * mu for c, mu in everything)
    known = len(chains)
    least, most = prefix_bounds(capacities[:known], rates[:known], arrivals)
    response = response_bound(capacities, rates, arrivals, upper=False)
    assert response is not None
    assert least <= response * (1 + 1e-9)
    assert response <= most * (1 + 1e-9)


def test_a_bound_is_known_long_before_all_chains_are_cut() -> None:
    read = []

    def cuts() -> Iterator[tuple[list[int], int, float]]:
        for number in range(1_000):
            read.append(number)
            yield [number], 10, 10.0 + number / 50

    every = list(cuts())
    capacities, rates = [c for _, c, _ in every], [1 / s for *_, s in every]
    expected = response_bound(capacities, rates, 20.0, upper=False)
    assert expected is not None
    read.clear()
    found = bounded_response_s(cuts(), 20.0, math.inf, upper=False)
    assert found == pytest.approx(expected, rel=1e-13)
    assert len(read) < 60
    read.clear()
    assert bounded_response_s(cuts(), 20.0, 0.99 * expected, upper=True) is None
    assert len(read) < 60
    assert bounded_response_s(cuts(), 20.0, 9.0, upper=False) is None
    assert bounded_response_s(iter(every), 1e6, math.inf, upper=False) is None
    upper = bounded_response_s(iter(every), 20.0, math.inf, upper=True)
    assert upper == response_bound(capacities, rates, 20.0, upper=True)


@pytest.mark.parametrize("arrivals", [0.1, 40.0, 900.0])
def test_states_too_unlikely_to_matter_cost_nothing(arrivals: float) -> None:
    few = response_bounds([3_000, 4_000], [0.5, 0.4], arrivals)
    many = response_bounds([3_000, 10**11], [0.5, 0.4], arrivals)
    assert few is not None
    assert many is not None
    assert many.response_lower_s == pytest.approx(few.response_lower_s, rel=1e-12)
    # The upper bound fills the slow ones first, of which there are enough either way.
    assert many.response_upper_s == pytest.approx(2.5, rel=1e-9)
    with pytest.raises(InvalidInput, match="sessions going"):
        response_bounds([10**11], [0.5], 1e10)
