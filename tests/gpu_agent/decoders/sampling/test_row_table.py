"""What kernels are told of a row, and how their finalists are decided."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch")

from catenary_agent.decoders.sampling.gumbel import exact_noise
from catenary_agent.decoders.sampling.kernel_sampler import decided
from catenary_agent.decoders.triton_kernels.row_table import (
    COLUMNS,
    NO_BOUND,
    RESULTS,
    StepFilters,
    filters_of,
    row_constants,
)
from catenary_services.domain.sampling import SamplingParameters


def table_of(*parameters: SamplingParameters) -> np.ndarray:
    lines = [(0, 5, *row_constants(each), -1) for each in parameters]
    return np.array(lines, np.int64).reshape(len(lines), COLUMNS)


def test_a_row_has_the_numbers_that_the_plain_sampler_computes_with() -> None:
    values = SamplingParameters(temperature=0.7, top_k=50, top_p=0.9, min_p=0.05, seed=3)
    _, _, temperature, least, top_k, top_p, draws, _ = table_of(values)[0]
    assert np.int32(temperature).view(np.float32) == np.float32(0.7)
    assert -np.int32(least).view(np.float32) == np.float32(math.log(0.05))
    assert (top_k, draws) == (50, 1)
    assert top_p.view(np.float64) == 0.9
    assert table_of(SamplingParameters(temperature=1.0))[0, 3] == NO_BOUND


def test_filters_are_those_that_some_row_asks_for() -> None:
    greedy, plain = SamplingParameters(top_k=5, top_p=0.5), SamplingParameters(temperature=1.0)
    limited = SamplingParameters(temperature=1.0, top_k=5)
    shared = SamplingParameters(temperature=1.0, top_p=0.5)
    assert filters_of(table_of(greedy)) == StepFilters(False, False, False)
    assert filters_of(table_of(greedy, plain)) == StepFilters(True, False, False)
    assert filters_of(table_of(limited, greedy)) == StepFilters(True, True, False)
    assert filters_of(table_of(plain, shared)) == StepFilters(True, False, True)


def test_only_finalists_that_are_near_are_compared_exactly() -> None:
    bits = np.array([[1 << 20, 1 << 10], [1 << 10, 1 << 20], [7, 7]])
    noise = exact_noise(np, bits)
    assert noise[0, 0] < noise[0, 1]
    found = np.zeros((4, RESULTS), np.int32)
    found[:3, :2] = ((10, 20), (30, 40), (60, 50))
    found[:3, 2:4] = bits
    found[:, 6] = (1, 1, 1, 0)
    found[3, :2] = (-1, 9)
    assert decided(found) == [20, 30, 50, -1]
    found[0, 4] = np.float32(50).view(np.int32)  # by so much its scaled logit leads
    assert decided(found) == [10, 30, 50, -1]
    found[:, 6] = 0
    assert decided(found) == [10, 30, 60, -1]
