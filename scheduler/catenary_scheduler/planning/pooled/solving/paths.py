"""Shortest paths over blocks, classes and batch sizes: a bound for models not enumerated in time.

A pipeline is a path from the first block to the last, whose edges are partitions on a device. Its
price per request and its latency are sums over the edges, so that with a price on latency, too, the
cheapest path costs no more than the cheapest pipeline that keeps the SLO.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from catenary_scheduler.planning.pooled.columns.device_tables import (
    DeviceTables,
    Floats,
    device_tables,
)
from catenary_scheduler.planning.pooled.problem import PooledModel, PoolingProblem

_PRICES_OF_LATENCY = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Prices of the whole latency that are tried, as multiples of a free path's price."""


def least_price(
    problem: PoolingProblem,
    model: PooledModel,
    prices: Floats,
    seconds_left: Callable[[], float],
) -> float:
    """Returns a price per request (per second) that no pipeline of a model falls below.

    Args:
        problem: The problem, with its classes and the length of the longest pipeline.
        model: The model.
        prices: Price of a GPU of each class.
        seconds_left: Returns the seconds that are left; without any, latency has no price.
    """
    tables = device_tables(problem, model)
    budget = model.slo_us - model.margin_us
    building = np.arange(len(tables.latency_us)) * model.batch_build_us_per_row
    price = _cheapest(tables, prices, 0.0, problem.max_partitions)
    free = float(price.min(initial=np.inf))
    for part in _PRICES_OF_LATENCY:
        if seconds_left() <= 0 or not 0 < free < np.inf:
            break
        of_latency = part * free / budget
        path = _cheapest(tables, prices, of_latency, problem.max_partitions)
        price = np.maximum(price, path + of_latency * (building - budget))
    return float(price.min(initial=np.inf))


def _cheapest(
    tables: DeviceTables, prices: Floats, of_latency: float, max_partitions: int
) -> Floats:
    """Returns the price of the cheapest path by batch size."""
    runs = np.isfinite(tables.latency_us)
    per_gpu = np.where(runs, tables.rate, 1.0) * tables.level_of[:, None, None]
    edge = prices[tables.class_of][:, None, None] / per_gpu
    edge = np.where(runs, edge + of_latency * np.where(runs, tables.latency_us, 0.0), np.inf)
    batch = np.arange(1, len(edge) + 1)[:, None, None, None]
    hop = of_latency * batch * tables.transfer_us  # batch, from, to, cut
    classes, ends = len(prices), edge.shape[-1]
    start = np.full((len(edge), classes, ends), np.inf)
    start[:, :, 0] = 0.0
    best = np.full(len(edge), np.inf)
    for _ in range(max_partitions):
        reached = np.full_like(start, np.inf)
        for device, gpu_class in enumerate(tables.class_of.tolist()):
            here = (start[:, gpu_class, :, None] + edge[:, device]).min(axis=1)
            np.minimum(reached[:, gpu_class], here, out=reached[:, gpu_class])
        np.minimum(best, reached[:, :, -1].min(axis=1), out=best)
        start = (reached[:, :, None, :] + hop).min(axis=1)
    return best
