"""AlpaServe's placement (Li et al., OSDI 2023, Algorithms 1 and 2) with our profiles.

The GPUs of a class are divided into groups of equal size. A group is a pipeline of one GPU for each
stage, and every model that it hosts is cut over its stages, so models take turns on the same GPUs
and a burst of one finds those of the others idle. Which models a group hosts is found greedily: the
load is simulated, and the model that misses most deadlines is added to the groups with the least to
do (the paper's fast heuristic for Algorithm 1). Group sizes are enumerated (Algorithm 2).

Departures, all in its favour or for time: requests are served in batches of the size that serves
most within the SLO less its margin, as every planner here; groups of one class that host the same
models are one pipeline with pools; a step adds a model to an eighth of the groups of a class at a
time; and the load is not given but the largest that the placement serves, as in `plan_pools`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapreplace
from itertools import product

from catenary_scheduler.planning.pooled.infeasible import check_problem
from catenary_scheduler.planning.pooled.planner import Clock
from catenary_scheduler.planning.pooled.problem import (
    PooledModelPlan,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
    SharedRoute,
)
from catenary_scheduler.planning.pooled.shared_routes import HostPool, fit, weights_of
from catenary_services.errors import PlanInfeasible

TARGET = 0.99
"""Share of the requests of every model that is in time at the load of a plan."""
_REQUESTS = 3000
"""Requests of a simulation."""
_PARTS = 8
"""The groups of a class take a model in so many steps."""
_HALVINGS = 8
"""Steps of the search for the largest load."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A model as one group of GPUs serves it."""

    pipeline: PooledPipeline
    """The cut of its blocks over the stages of the group, each a single GPU."""
    weights: tuple[int, ...]
    """Bytes of its weights on the GPU of each stage."""

    @property
    def latency_us(self) -> float:
        return self.pipeline.latency_us

    @property
    def occupied_us(self) -> float:
        """Time of the group's slowest stage that a request takes, in a full batch."""
        return 1e6 / self.pipeline.throughput_rps


@dataclass(slots=True)
class Groups:
    """Equal groups that host the same models: `count` of them, each with a GPU for each stage."""

    gpu: str
    stages: int
    count: int
    hosted: dict[int, Hosted]
    """The models, by their numbers."""


class Load:
    """Requests in a fixed random order, whose rates scale together."""

    def __init__(self, problem: PoolingProblem, seed: int) -> None:
        draw = random.Random(seed)
        weights = [model.weight for model in problem.models]
        self.models = draw.choices(range(len(weights)), weights, k=_REQUESTS)
        self.gaps = [draw.expovariate(sum(weights)) for _ in range(_REQUESTS)]
        self.slo_us = [model.slo_us for model in problem.models]
        self.offered = [max(1, self.models.count(each)) for each in range(len(weights))]


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of a simulation."""

    missed: list[int]
    """Requests that were not in time, by model."""
    busy: list[float]
    """Share of the time in which groups computed, by kind of groups."""
    attainment: float
    """Share of the requests in time, of the model with the least."""


def plan_alpa_serve(
    problem: PoolingProblem, *, seed: int = 1, clock: Clock | None = None
) -> PooledPlan:
    """Returns the placement that serves the largest load, of all sizes of groups.

    The pools of a group are those of its first model, and its other models have shared routes
    through them; `catenary_lab.scenarios.pools.jobs` gives all of them equal rights.

    Raises:
        PlanInfeasible: No placement hosts every model within its SLO.
    """
    begun = clock() if clock else 0.0
    check_problem(problem)
    load = Load(problem, seed)
    best: tuple[float, list[Groups]] | None = None
    for sizes in _sizes(problem):
        placed = PlacementFinder(problem, load, sizes).find()
        if placed is not None and (best is None or placed[0] > best[0]):
            best = placed
    if best is None:
        raise PlanInfeasible("alpaserve: no groups host every model within its SLO")
    scale, groups = best
    models = _model_plans(problem, groups)
    seconds = clock() - begun if clock else 0.0
    return PooledPlan(scale, scale, False, "alpaserve", seconds, models)


def _sizes(problem: PoolingProblem) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of stages of the groups of each class."""
    choices = [
        [size for size in range(1, problem.max_partitions + 1) if size <= gpu.count] or [0]
        for gpu in problem.classes
    ]
    yield from product(*choices)


class PlacementFinder:
    """A search for the models of groups whose sizes are given."""

    def __init__(self, problem: PoolingProblem, load: Load, sizes: Sequence[int]) -> None:
        """Takes the number of stages of the groups of each class; 0 leaves a class out."""
        self._problem = problem
        self._load = load
        self._sizes = sizes
        self._fitted = cache(self._fit)

    def find(self) -> tuple[float, list[Groups]] | None:
        """Returns the largest load found, as throughput / weight, and its placement.

        None if a model fits nowhere.
        """
        start = [
            Groups(gpu.name, size, gpu.count // size, {})
            for gpu, size in zip(self._problem.classes, self._sizes, strict=True)
            if size
        ]
        everywhere = self._everywhere(start)
        if len({model for each in everywhere for model in each.hosted}) < self._models:
            return None
        # Where all host all, nothing idles that could serve: about as much as groups can carry.
        scale = self.largest_load(everywhere)
        greedy = self._greedy(start, scale)
        found = [(scale, everywhere), (self.largest_load(greedy), greedy)]
        return max(found, key=lambda each: each[0])

    @property
    def _models(self) -> int:
        return len(self._problem.models)

    def _fit(self, model: int, gpu: str, stages: int) -> Hosted | None:
        given = self._problem.models[model]
        given = replace(given, slo_us=given.slo_us - given.margin_us)
        classes = {each.name: each for each in self._problem.classes}
        pipeline = fit(given, [HostPool(gpu, 1, 1)] * stages, classes)
        if pipeline is None:
            return None
        weights = tuple(weights_of(given, pipeline.partitions))
        return Hosted(pipeline, weights)

    def _hosts(self, groups: Groups, model: int) -> Hosted | None:
        """Returns a model as these groups would host it; None if they cannot, or do already."""
        hosted = self._fitted(model, groups.gpu, groups.stages)
        if hosted is None or model in groups.hosted:
            return None
        memory = next(g.memory_bytes for g in self._problem.classes if g.name == groups.gpu)
        if memory is not None:
            there = [each.weights for each in (*groups.hosted.values(), hosted)]
            if any(sum(stage) > memory for stage in zip(*there, strict=True)):
                return None
        return hosted

    def _everywhere(self, start: Sequence[Groups]) -> list[Groups]:
        """Returns all models on all groups, as memory allows, the largest share of load first."""
        made = [replace(each, hosted={}) for each in start]
        order = sorted(range(self._models), key=lambda m: -self._problem.models[m].weight)
        for model in order:
            for groups in made:
                hosted = self._hosts(groups, model)
                if hosted is not None:
                    groups.hosted[model] = hosted
        return made

    def _greedy(self, start: Sequence[Groups], scale: float) -> list[Groups]:
        """Returns the best placement on the way to one in which nothing can be added."""
        totals = {each.gpu: each.count for each in start}
        placed = [replace(each, hosted={}) for each in start]
        best, attained = placed, -1.0
        while True:
            trial = self.simulate(placed, scale)
            if trial.attainment > attained:
                best, attained = placed, trial.attainment
            # A model that is in time everywhere needs no further groups.
            order = [m for m in range(self._models) if trial.missed[m]]
            order.sort(key=lambda m: -trial.missed[m])
            added = self._added(placed, order, trial.busy, totals)
            if added is None:
                return best
            placed = added

    def _added(
        self,
        placed: list[Groups],
        order: Sequence[int],
        busy: Sequence[float],
        totals: Mapping[str, int],
    ) -> list[Groups] | None:
        """Returns the placement with a model on some more groups; None if none can be added."""
        for model in order:
            for at in sorted(range(len(placed)), key=busy.__getitem__):
                groups = placed[at]
                hosted = self._hosts(groups, model)
                if hosted is None:
                    continue
                taken = min(groups.count, max(1, totals[groups.gpu] // _PARTS))
                rest = [*placed[:at], *placed[at + 1 :]]
                if groups.count > taken:
                    rest.append(replace(groups, count=groups.count - taken))
                with_it = {**groups.hosted, model: hosted}
                return merged([*rest, replace(groups, count=taken, hosted=with_it)])
        return None

    def largest_load(self, placed: Sequence[Groups]) -> float:
        """Returns the largest throughput / weight at which every model is in time."""
        high = 1.0
        while self.simulate(placed, high).attainment >= TARGET:
            high *= 2
        low = 0.0 if high == 1.0 else high / 2
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.simulate(placed, middle).attainment >= TARGET:
                low = middle
            else:
                high = middle
        return low

    def simulate(self, placed: Sequence[Groups], scale: float) -> Trial:
        """Serves the load at a scale, first come, first served, each on the group that ends first.

        A request that would be late is not served.
        """
        load = self._load
        free: list[list[float]] = [[0.0] * each.count for each in placed]
        places: list[list[tuple[int, float, float]]] = [[] for _ in range(self._models)]
        for at, groups in enumerate(placed):
            for model, hosted in groups.hosted.items():
                places[model].append((at, hosted.latency_us, hosted.occupied_us))
        missed, work, now = [0] * self._models, [0.0] * len(placed), 0.0
        for model, gap in zip(load.models, load.gaps, strict=True):
            now += gap * 1e6 / scale
            best, ends = None, now + load.slo_us[model]
            for at, latency, occupied in places[model]:
                end = max(now, free[at][0]) + latency
                if end <= ends:
                    best, ends = (at, occupied), end
            if best is None:
                missed[model] += 1
                continue
            at, occupied = best
            heapreplace(free[at], max(now, free[at][0]) + occupied)
            work[at] += occupied
        busy = [did / (each.count * now) for did, each in zip(work, placed, strict=True)]
        in_time = [1 - m / offered for m, offered in zip(missed, load.offered, strict=True)]
        return Trial(missed, busy, min(in_time))


def merged(placed: Sequence[Groups]) -> list[Groups]:
    """Returns the groups with those of one class and the same models counted together."""
    kinds: dict[tuple[str, int, frozenset[int]], Groups] = {}
    for each in placed:
        key = (each.gpu, each.stages, frozenset(each.hosted))
        count = kinds[key].count if key in kinds else 0
        kinds[key] = replace(each, count=each.count + count)
    return list(kinds.values())


def _model_plans(problem: PoolingProblem, placed: Sequence[Groups]) -> tuple[PooledModelPlan, ...]:
    own: list[list[PooledPipeline]] = [[] for _ in problem.models]
    shared: list[list[SharedRoute]] = [[] for _ in problem.models]
    for groups in placed:
        if not groups.hosted:
            continue
        owner = min(groups.hosted)
        place = (owner, len(own[owner]))
        for model, hosted in sorted(groups.hosted.items()):
            pipeline = _times(hosted.pipeline, groups.count)
            if model == owner:
                own[model].append(pipeline)
            else:
                shared[model].append(SharedRoute(*place, pipeline))
    return tuple(
        PooledModelPlan(
            model.name,
            sum(each.throughput_rps for each in (*mine, *(r.pipeline for r in routes))),
            tuple(mine),
            tuple(routes),
        )
        for model, mine, routes in zip(problem.models, own, shared, strict=True)
    )


def _times(pipeline: PooledPipeline, count: int) -> PooledPipeline:
    """Returns a pipeline with so many GPUs in each of its pools."""
    return replace(
        pipeline,
        throughput_rps=pipeline.throughput_rps * count,
        partitions=tuple(
            replace(part, vgpus=count, gpus=float(count)) for part in pipeline.partitions
        ),
    )
