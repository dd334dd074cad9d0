"""Cost and yield of planning on the PPipe reference data, compared with the limits and Gurobi.

Every instance is planned once, enumeration included, with NumPy and (for large clusters) HiGHS in
one thread. `free` are this project's rules with up to three partitions, `reference` those of the
artifact.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from catenary_lab.limits import Figure, at_least, at_most
from catenary_lab.pools.artifact.solving import solve_by_reference_rules
from catenary_lab.scenarios.data import data_folder
from catenary_scheduler.planning.pooled import plan_pools
from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from catenary_scheduler.planning.pooled.problem import PoolingProblem

LIMIT_MEAN_MS = 100.0
LIMIT_MAX_MS = 500.0
LIMIT_LARGE_S = 10.0
LIMIT_GAIN_PERCENT = 101.0
LIMIT_EQUAL_PERCENT = 0.01
GUROBI_TOLERANCE_PERCENT = 1e-4
"""Error in per cent by which Gurobi's plans break whole numbers (74.999995 GPUs count as 75)."""


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    data = load_dataset(data_folder("ppipe", "dataset"))
    chosen = list(data.instances)[:: 6 if quick else 1]
    groups = [name for name in chosen if name.startswith("maf")]
    plan_pools(data.problem(chosen[0]))  # imports and caches
    return [
        *_free(data, chosen, groups),
        *_reference(data, groups),
        *_large(data.problem(groups[0]), quick),
    ]


def _free(data: PlanningDataset, chosen: list[str], groups: list[str]) -> list[Figure]:
    gains, milliseconds = {}, {}
    for name in chosen:
        problem = data.problem(name)
        begun = time.perf_counter()
        plan = plan_pools(problem)
        milliseconds[name] = (time.perf_counter() - begun) * 1e3
        assert plan.optimal
        gains[name] = 100.0 * plan.objective / _gurobi(data, name)
    three = [milliseconds[name] for name in groups]
    mean = statistics.mean(gains[name] for name in groups)
    least = 100.0 - GUROBI_TOLERANCE_PERCENT
    return [
        at_most("free: mean time, three models", statistics.mean(three), "ms", LIMIT_MEAN_MS),
        at_most("free: longest, three models", max(three), "ms", LIMIT_MAX_MS),
        at_least("free: least objective, of Gurobi's", min(gains.values()), "%", least),
        at_least("free: mean objective, three models", mean, "%", LIMIT_GAIN_PERCENT),
        at_most("free: mean objective, ablation as well", statistics.mean(gains.values()), "%"),
        at_most("free: largest objective, of Gurobi's", max(gains.values()), "%"),
    ]


def _reference(data: PlanningDataset, groups: list[str]) -> list[Figure]:
    differences, milliseconds = [], []
    for name in groups:
        problem = data.problem(name, data.instance(name).max_partitions)
        begun = time.perf_counter()
        plan = plan_pools(problem, solve=solve_by_reference_rules)
        milliseconds.append((time.perf_counter() - begun) * 1e3)
        assert plan.optimal
        differences.append(abs(100.0 * plan.objective / _gurobi(data, name) - 100.0))
    return [
        at_most("reference: mean time", statistics.mean(milliseconds), "ms", LIMIT_MEAN_MS),
        at_most("reference: longest", max(milliseconds), "ms", LIMIT_MAX_MS),
        at_most("reference: away from Gurobi", max(differences), "%", LIMIT_EQUAL_PERCENT),
    ]


def _large(small: PoolingProblem, quick: bool) -> list[Figure]:
    figures = []
    for factor in (1000,) if quick else (10, 100, 1000):
        classes = tuple(replace(gpu, count=gpu.count * factor) for gpu in small.classes)
        begun = time.perf_counter()
        plan = plan_pools(replace(small, classes=classes), clock=time.perf_counter)
        seconds = time.perf_counter() - begun
        gap = 100.0 * (plan.bound / plan.objective - 1.0)
        figures += [
            at_most(f"{factor * 100:,} GPUs: time", seconds, "s", LIMIT_LARGE_S),
            at_most(f"{factor * 100:,} GPUs: gap", gap, "%"),
        ]
    return figures


def _gurobi(data: PlanningDataset, name: str) -> float:
    return float(data.instance(name).reference["v4"]["objective"])
