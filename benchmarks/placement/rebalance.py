"""Quality of placement and re-balancing compared with exact twins, and of predicted answer lengths.

Best fit is compared with the mixed-integer programme of the paper's section 4.1, and Algorithm 2
with every assignment, on random cases. The predictor learns from half of the ShareGPT lengths and
is tried on the other half.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Callable
from statistics import mean, median

from benchmarks.placement.placement_twins import (
    fewest_workers,
    least_objective,
    opened_by_best_fit,
    random_imbalance,
    random_placement,
)
from catenary_lab.limits import Figure, at_least, at_most
from catenary_lab.scenarios.data import data_file
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.dispatch.placing.rebalancing.rebalance import rebalance

SINGLE = 320
BATCHES = 300
IMBALANCES = 600
SPLITS = 5
DATA_SETS = ("sharegpt_first_turn", "sharegpt_all_turns")


def run(quick: bool) -> list[Figure]:
    """Returns the figures; the random cases are the same every time."""
    return [
        *_placement(SINGLE if quick else 3 * SINGLE, 30 if quick else BATCHES),
        *_rebalancing(IMBALANCES if quick else 3 * IMBALANCES),
        *_large(3 if quick else 20),
        *_lengths(1 if quick else SPLITS),
    ]


def _placement(single: int, batches: int) -> list[Figure]:
    cases = [random_placement(seed) for seed in range(single)]
    equal = sum(opened_by_best_fit(case) == fewest_workers(case) for case in cases)
    opened = least = same = compared = 0
    for seed in range(1000, 1000 + batches):
        case = random_placement(seed, arriving=2 + seed % 3)
        if case.lines.decode_lone_ns > case.limits.per_token_ns:
            continue  # not even a lone session keeps T_dec (reading R2)
        here, optimum = opened_by_best_fit(case), fewest_workers(case)
        if here is not None and optimum is not None:
            compared += 1
            opened, least, same = opened + here, least + optimum, same + (here == optimum)
    return [
        at_least(f"one request: best fit decides as the MIP, of {single}", equal, "cases", single),
        at_most(f"2-4 at once: workers best fit opens, {compared} cases", opened, "workers"),
        at_most("2-4 at once: workers the MIP opens", least, "workers"),
        at_least("2-4 at once: cases where both open as many", same, "cases", 0.9 * compared),
    ]


def _rebalancing(cases: int) -> list[Figure]:
    problems = [random_imbalance(seed) for seed in range(cases)]
    optima = [least_objective(problem) for problem in problems]
    began = time.thread_time()
    found = [rebalance(problem).objective for problem in problems]
    took_us = (time.thread_time() - began) / cases * 1e6
    searched = [rebalance(problem, exact_steps=0).objective for problem in problems]
    within = sum(a <= 1.01 * b + 1e-9 for a, b in zip(found, optima, strict=True))
    alone = sum(a <= b + 1e-6 for a, b in zip(searched, optima, strict=True))
    return [
        at_least(f"re-balancing: within 1 % of the optimum, of {cases}", within, "cases", cases),
        at_least("re-balancing, search only: optimal", alone, "cases", 0.97 * cases),
        at_most("re-balancing: time, 2-3 workers and up to 6 requests", took_us, "us"),
    ]


def _large(repeats: int) -> list[Figure]:
    figures = []
    for workers, requests in ((8, 20), (16, 40), (32, 80)):
        times = []
        for seed in range(repeats):
            problem = random_imbalance(seed, workers, requests)
            began = time.thread_time()
            rebalance(problem)
            times.append((time.thread_time() - began) * 1e3)
        name = f"re-balancing: time, {workers} workers and {requests} requests"
        figures.append(at_most(name, median(times), "ms"))
    return figures


def _lengths(splits: int) -> list[Figure]:
    figures = []
    for name in DATA_SETS:
        with data_file(f"llm/{name}.csv", "lengths").open() as stream:
            rows = [(int(row["l_in"]), int(row["l_out"])) for row in csv.DictReader(stream)]
        ours, overall = [], []
        for seed in range(splits):
            random.Random(seed).shuffle(rows)
            train, test = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            predictor = LengthPredictor()
            for prompt, answer in train:
                predictor.learn(prompt, answer)
            all_of_them = mean(answer for _, answer in train)
            ours.append(_bucket_error(test, predictor.predict))
            overall.append(_bucket_error(test, lambda _, same=all_of_them: same))  # type: ignore[misc]
        label = name.removeprefix("sharegpt_").replace("_", " ")
        figures += [
            at_most(f"{label}: error of the mean per bucket", mean(ours), "tokens", mean(overall)),
            at_most(f"{label}: the same with one mean for all", mean(overall), "tokens"),
        ]
    return figures


def _bucket_error(rows: list[tuple[int, int]], predict: Callable[[int], float]) -> float:
    """Returns the mean of |mean predicted - mean real answer| over requests, by power of two."""
    buckets: dict[int, list[float]] = {}
    for prompt, answer in rows:
        buckets.setdefault(prompt.bit_length(), []).append(predict(prompt) - answer)
    return sum(abs(sum(errors)) for errors in buckets.values()) / len(rows)
