"""Small planning problems, what must hold of any plan, and planners that try everything."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict

import numpy as np

from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    PooledModel,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)

SLACK = 1e-6


def random_problem(
    seed: int,
    *,
    classes: int = 2,
    models: int = 2,
    most_gpus: int = 3,
    levels: tuple[int, ...] = (1, 2),
    blocks: int = 3,
    max_partitions: int = 2,
) -> PoolingProblem:
    """A problem in which cuts, levels, classes and batches all have their price."""
    rng = random.Random(seed)
    gpus = tuple(
        GpuClass(
            name=f"class-{index}",
            count=rng.randint(1, most_gpus),
            levels=levels if rng.random() < 0.8 else (1,),
            gpus_per_server=rng.randint(1, 3),
            server_bits_per_second=rng.choice([1e9, 5e9]),
            memory_bytes=rng.choice([None, 60]),
            cost_per_hour=rng.choice([1.0, 2.5]),
        )
        for index in range(classes)
    )
    return PoolingProblem(
        classes=gpus,
        models=tuple(_random_model(rng, f"model-{index}", gpus, blocks) for index in range(models)),
        max_partitions=max_partitions,
    )


def _random_model(
    rng: random.Random, name: str, classes: tuple[GpuClass, ...], blocks: int
) -> PooledModel:
    latency = {}
    for gpu in classes:
        base = np.array([rng.uniform(500, 3000) for _ in range(blocks)]) * rng.uniform(0.5, 2.5)
        for level in gpu.levels:
            # A smaller virtual GPU is slower, but by less than its share: sharing pays, at a price.
            one = base * (1 + (level - 1) * rng.uniform(0.4, 1.2))
            batches = rng.randint(1, 3) if level == 1 else rng.randint(1, 2)
            latency[gpu.name, level] = np.stack(
                [one * (1 + row * rng.uniform(0.5, 1.0)) for row in range(batches)], axis=1
            )
    quickest = min(float(times[:, 0].sum()) for times in latency.values())
    return PooledModel(
        name=name,
        blocks=blocks,
        latency_us=latency,
        cut_bytes=(0, *(rng.randint(1_000, 200_000) for _ in range(blocks - 1)), 0),
        slo_us=quickest * rng.uniform(1.1, 6.0),
        margin_us=quickest * rng.uniform(0.0, 0.1),
        weight=rng.choice([1.0, 0.3, 0.7]),
        batch_build_us_per_row=rng.choice([0.0, 300.0]),
        block_weight_bytes=rng.choice([(), tuple(rng.randint(1, 30) for _ in range(blocks))]),
    )


# What must hold of any plan: the definitions of the reference data, written out once more.


def assert_keeps_the_rules(problem: PoolingProblem, plan: PooledPlan) -> None:
    assert [served.name for served in plan.models] == [model.name for model in problem.models]
    counts = {gpu.name: gpu.count for gpu in problem.classes}
    whole: dict[str, int] = defaultdict(int)
    for model, served in zip(problem.models, plan.models, strict=True):
        fractions: dict[tuple[int, str], float] = defaultdict(float)
        for pipeline in served.pipelines:
            assert_keeps_the_slo(problem, model, pipeline)
            for position, part in enumerate(pipeline.partitions):
                assert part.vgpus >= 1
                assert part.gpus == part.vgpus / part.level
                fractions[position, part.gpu] += part.gpus
        for (_, gpu), fraction in fractions.items():
            whole[gpu] += math.ceil(fraction - SLACK)
        total = sum(pipeline.throughput_rps for pipeline in served.pipelines)
        assert math.isclose(served.throughput_rps, total)
    for gpu_name, used in whole.items():
        assert used <= counts[gpu_name]


def assert_keeps_the_slo(
    problem: PoolingProblem, model: PooledModel, pipeline: PooledPipeline
) -> None:
    assert 1 <= len(pipeline.partitions) <= problem.max_partitions
    bounds = [part.first_block for part in pipeline.partitions] + [
        pipeline.partitions[-1].last_block
    ]
    assert bounds[0] == 0
    assert bounds[-1] == model.blocks
    assert bounds == sorted(set(bounds))
    for before, after in itertools.pairwise(pipeline.partitions):
        assert before.last_block == after.first_block
    latency, rate = _measured(problem, model, pipeline)
    assert math.isclose(pipeline.latency_us, latency, rel_tol=1e-9)
    assert latency <= (model.slo_us - model.margin_us) * (1 + 1e-9)
    assert math.isclose(pipeline.throughput_rps, rate, rel_tol=1e-9)
    classes = {gpu.name: gpu for gpu in problem.classes}
    for part in pipeline.partitions:
        gpu = classes[part.gpu]
        assert part.level in gpu.levels
        if gpu.memory_bytes is not None and model.block_weight_bytes:
            weights = sum(model.block_weight_bytes[part.first_block : part.last_block])
            assert weights * part.level <= gpu.memory_bytes


def _measured(
    problem: PoolingProblem, model: PooledModel, pipeline: PooledPipeline
) -> tuple[float, float]:
    classes = {gpu.name: gpu for gpu in problem.classes}
    batch = pipeline.batch
    latency = (batch - 1) * model.batch_build_us_per_row
    rates = []
    for index, part in enumerate(pipeline.partitions):
        gpu = classes[part.gpu]
        times = model.latency_us[part.gpu, part.level][:, batch - 1]
        compute = sum(times[part.first_block : part.last_block])
        latency += compute
        one = 1e6 * batch / compute
        for cut in (part.first_block, part.last_block):
            if model.cut_bytes[cut]:
                transfer_us = model.cut_bytes[cut] * 8e6 / gpu.server_bits_per_second
                one = min(one, 1e6 / transfer_us / part.level / gpu.gpus_per_server)
        rates.append(one * part.vgpus)
        if index:
            before = classes[pipeline.partitions[index - 1].gpu]
            slowest = min(before.server_bits_per_second, gpu.server_bits_per_second)
            latency += batch * model.cut_bytes[part.first_block] * 8e6 / slowest
    return latency, min(rates)


# Planners that try everything.


class Option:
    """One pipeline without pool sizes: per partition (class, level, rate of a virtual GPU)."""

    def __init__(self, pools: tuple[tuple[int, int, float], ...]) -> None:
        self.pools = pools


def all_options(problem: PoolingProblem, model: PooledModel) -> list[Option]:
    devices = [
        (index, gpu, level)
        for index, gpu in enumerate(problem.classes)
        for level in gpu.levels
        if gpu.count and (gpu.name, level) in model.latency_us
    ]
    options = []
    for length in range(1, problem.max_partitions + 1):
        for cuts in itertools.combinations(range(1, model.blocks), length - 1):
            bounds = (0, *cuts, model.blocks)
            for chosen in itertools.product(devices, repeat=length):
                for batch in range(1, 9):
                    option = _option(model, bounds, chosen, batch)
                    if option is not None:
                        options.append(option)
    return options


def _option(
    model: PooledModel,
    bounds: tuple[int, ...],
    chosen: tuple[tuple[int, GpuClass, int], ...],
    batch: int,
) -> Option | None:
    latency = (batch - 1) * model.batch_build_us_per_row
    pools = []
    for position, (index, gpu, level) in enumerate(chosen):
        first, last = bounds[position], bounds[position + 1]
        times = model.latency_us[gpu.name, level]
        if batch > times.shape[1]:
            return None
        weights = sum(model.block_weight_bytes[first:last])
        if gpu.memory_bytes is not None and weights * level > gpu.memory_bytes:
            return None
        compute = float(times[first:last, batch - 1].sum())
        latency += compute
        rate = 1e6 * batch / compute
        for cut in (first, last):
            if model.cut_bytes[cut]:
                seconds = model.cut_bytes[cut] * 8 / gpu.server_bits_per_second
                rate = min(rate, 1 / seconds / level / gpu.gpus_per_server)
        if position:
            before = chosen[position - 1][1]
            slowest = min(before.server_bits_per_second, gpu.server_bits_per_second)
            latency += batch * model.cut_bytes[first] * 8e6 / slowest
        pools.append((index, level, rate))
    return Option(tuple(pools)) if latency <= model.slo_us - model.margin_us else None


Cell = tuple[int, ...]


def best_free_rates(
    problem: PoolingProblem, model: PooledModel, *, share: bool = True
) -> dict[Cell, float]:
    """By whole GPUs of each class the best rate under our own rules, by plain recursion."""
    counts = [gpu.count for gpu in problem.classes]
    options = all_options(problem, model)
    atoms = _single_atoms(options, counts)
    for cell, rate in (_pair_atoms(options, counts) if share else {}).items():
        atoms[cell] = max(atoms.get(cell, 0.0), rate)
    best: dict[Cell, float] = {}
    for cell in itertools.product(*(range(count + 1) for count in counts)):
        best[cell] = 0.0
        for atom, rate in atoms.items():
            if all(a <= c for a, c in zip(atom, cell, strict=True)):
                rest = tuple(c - a for a, c in zip(atom, cell, strict=True))
                best[cell] = max(best[cell], rate + best[rest])
    return best


def _single_atoms(options: list[Option], counts: list[int]) -> dict[Cell, float]:
    atoms: dict[Cell, float] = {}
    for option in options:
        ranges = [range(1, counts[index] + 1) for index, _, _ in option.pools]
        for sizes in itertools.product(*ranges):
            cell = _cell(option, sizes, len(counts))
            if all(a <= c for a, c in zip(cell, counts, strict=True)):
                rate = min(
                    size * level * one
                    for size, (_, level, one) in zip(sizes, option.pools, strict=True)
                )
                atoms[cell] = max(atoms.get(cell, 0.0), rate)
    return atoms


def _pair_atoms(options: list[Option], counts: list[int]) -> dict[Cell, float]:
    """Two pipelines that share one GPU at a position, cut into equal virtual GPUs."""
    halves: dict[tuple[int, int, int, int], dict[Cell, float]] = defaultdict(dict)
    for option in options:
        for position, (index, level, _) in enumerate(option.pools):
            for part in range(1, level):
                ranges = [range(1, counts[other] + 1) for other, _, _ in option.pools]
                ranges[position] = range(counts[index] + 1)
                for sizes in itertools.product(*ranges):
                    rate = min(
                        (size * level_of + (part if at == position else 0)) * one
                        for at, (size, (_, level_of, one)) in enumerate(
                            zip(sizes, option.pools, strict=True)
                        )
                    )
                    found = halves[position, index, level, part]
                    cell = _cell(option, sizes, len(counts))
                    found[cell] = max(found.get(cell, 0.0), rate)
    atoms: dict[Cell, float] = {}
    for (position, index, level, part), found in halves.items():
        for one, rate in found.items():
            for other, more in halves.get((position, index, level, level - part), {}).items():
                cell = tuple(
                    a + b + (at == index) for at, (a, b) in enumerate(zip(one, other, strict=True))
                )
                if all(a <= c for a, c in zip(cell, counts, strict=True)):
                    atoms[cell] = max(atoms.get(cell, 0.0), rate + more)
    return atoms


def _cell(option: Option, sizes: tuple[int, ...], classes: int) -> Cell:
    cell = [0] * classes
    for size, (index, _, _) in zip(sizes, option.pools, strict=True):
        cell[index] += size
    return tuple(cell)


def best_reference_rates(problem: PoolingProblem, model: PooledModel) -> dict[Cell, float]:
    """The same under the artifact's rules for two classes and up to two partitions."""
    counts = [gpu.count for gpu in problem.classes]
    options = all_options(problem, model)
    slots = list(itertools.product(range(2), repeat=2))
    usages = []
    for slot in slots:
        best: dict[tuple[float, float], float] = {(0.0, 0.0): 0.0}
        for option in options:
            if any(index != slot[at] for at, (index, _, _) in enumerate(option.pools)):
                continue
            ranges = [range(1, counts[index] * level + 1) for index, level, _ in option.pools]
            for vgpus in itertools.product(*ranges):
                fractions = [
                    used / level for used, (_, level, _) in zip(vgpus, option.pools, strict=True)
                ]
                key = (fractions[0], fractions[1] if len(fractions) > 1 else 0.0)
                rate = min(
                    used * one for used, (_, _, one) in zip(vgpus, option.pools, strict=True)
                )
                best[key] = max(best.get(key, 0.0), rate)
        usages.append(_not_beaten(best))
    return _best_of_slots(slots, usages, counts)


def _not_beaten(usage: dict[tuple[float, float], float]) -> dict[tuple[float, float], float]:
    """Without what another reaches with no more of a GPU at either position."""
    return {
        key: rate
        for key, rate in usage.items()
        if not any(
            other != key and other[0] <= key[0] and other[1] <= key[1] and more >= rate
            for other, more in usage.items()
        )
    }


def _best_of_slots(
    slots: list[tuple[int, ...]],
    usages: list[dict[tuple[float, float], float]],
    counts: list[int],
) -> dict[Cell, float]:
    """Every combination of one usage per slot, at once."""
    shape = [len(usage) for usage in usages]
    rate = np.zeros(shape)
    groups = np.zeros((2, 2, *shape))  # position, class
    for at, (slot, usage) in enumerate(zip(slots, usages, strict=True)):
        along = [-1 if other == at else 1 for other in range(len(slots))]
        rate = rate + np.array(list(usage.values())).reshape(along)
        for position in range(2):
            used = np.array([key[position] for key in usage]).reshape(along)
            groups[position, slot[position]] += used
    whole = np.ceil(groups - SLACK).sum(axis=0)
    best: dict[Cell, float] = {}
    for cell in itertools.product(*(range(count + 1) for count in counts)):
        allowed = (whole[0] <= cell[0]) & (whole[1] <= cell[1])
        best[cell] = float(rate[allowed].max())
    return best


def best_objective(problem: PoolingProblem, tables: list[dict[Cell, float]]) -> float:
    """The largest least rate / weight over all ways to divide the GPUs."""
    counts = [gpu.count for gpu in problem.classes]

    def best(at: int, room: Cell) -> float:
        if at == len(tables):
            return math.inf
        return max(
            min(
                tables[at][cell] / problem.models[at].weight,
                best(at + 1, tuple(r - c for r, c in zip(room, cell, strict=True))),
            )
            for cell in itertools.product(*(range(size + 1) for size in room))
        )

    return best(0, tuple(counts))
