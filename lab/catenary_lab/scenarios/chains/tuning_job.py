"""Simulates every placement that may be best, and asks every measure which c it would choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from catenary_lab.scenarios.chains.jobs import Requests, Setting
from catenary_scheduler.planning.chains import ChainTask, Composition, response_bounds
from catenary_scheduler.planning.chains.search import candidates, compose_at, least_surrogate
from catenary_scheduler.planning.chains.sizes import sizes_of
from catenary_services.errors import PlanInfeasible
from catenary_simulator.chains.cluster import ChainsCluster
from catenary_simulator.chains.serve import serve_chains
from catenary_simulator.chains.workload import SessionWorkload

Measure = Literal["surrogate", "lower", "upper"]
MEASURES: tuple[Measure, ...] = ("surrogate", "lower", "upper")
_TIED = 1e-12


@dataclass(slots=True)
class Point:
    """One placement, named by the smallest c that gives it."""

    c: int
    composition: Composition
    surrogate_s: float | None
    """The surrogate response time, c K(c) / lambda."""
    lower_s: float | None
    upper_s: float | None
    simulated_s: float | None = None

    def value(self, label: str) -> float | None:
        """Returns one of the numbers by its name."""
        found: float | None = getattr(self, f"{label}_s")
        return found


@dataclass(frozen=True, slots=True)
class Tuned:
    """The points found for one load."""

    points: tuple[Point, ...]
    chosen: Mapping[str, int | None]

    @property
    def best_s(self) -> float:
        """Least simulated response time."""
        return min(each.simulated_s for each in self.points if each.simulated_s is not None)

    def regret(self, measure: str) -> float | None:
        """Returns the share by which the response at the chosen c is above the best."""
        chosen = self.chosen[measure]
        if chosen is None:
            return None
        simulated = _at(self.points, chosen).simulated_s
        return None if simulated is None else simulated / self.best_s - 1.0

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the points."""
        names = ("surrogate", "lower", "upper", "simulated")
        return [
            {"c": point.c, **{f"{name}_s": point.value(name) for name in names}}
            for point in self.points
        ]


@dataclass(frozen=True, slots=True)
class TuningJob:
    """All c for one load on one topology."""

    setting: Setting
    rate_per_s: float
    stop: Literal["rate", "all"]
    target_load: float
    requests: int
    seed: int
    whole: bool
    """Whether to simulate every placement that can bear the load, even if it cannot be best."""

    def run(self) -> Tuned:
        cluster = self.setting.cluster()
        task = cluster.task(self.rate_per_s, self.target_load, self.stop)
        points = _points(task)
        if not any(point.lower_s is not None for point in points):
            raise PlanInfeasible(f"no c bears {self.rate_per_s:g} sessions per second")
        chosen: dict[str, int | None] = {
            "surrogate": _surrogate_c(task),
            "lower": _least(points, "lower"),
            "upper": _least(points, "upper"),
        }
        requests = Requests(self.requests, "poisson", self.rate_per_s, self.seed)
        workload = requests.workload(cluster.model)
        needed = [_at(points, c) for c in chosen.values() if c is not None]
        _simulate(points, needed, cluster, workload, whole=self.whole)
        chosen["simulated"] = _least(points, "simulated")
        # The simulation has used all of the composition; without it the result is small.
        return Tuned(tuple(points), chosen)


def _points(task: ChainTask) -> list[Point]:
    sizes = sizes_of(task)
    points = []
    for candidate in candidates(task, sizes):
        composition = compose_at(task, sizes, candidate.c)
        bounds = response_bounds(
            [chain.capacity for chain in composition.chains],
            [chain.rate_per_s for chain in composition.chains],
            float(task.rate_per_s),
        )
        needed = candidate.needed
        points.append(
            Point(
                candidate.c,
                composition,
                None if needed is None else candidate.c * needed / float(task.rate_per_s),
                None if bounds is None else bounds.response_lower_s,
                None if bounds is None else bounds.response_upper_s,
            )
        )
    return points


def _simulate(
    points: list[Point],
    needed: list[Point],
    cluster: ChainsCluster,
    workload: SessionWorkload,
    *,
    whole: bool,
) -> None:
    """Simulates in the order of lower bounds until no further one can be best."""
    best = math.inf
    ordered = sorted(points, key=lambda each: math.inf if each.lower_s is None else each.lower_s)
    for point in ordered:
        hopeless = point.lower_s is None or (point.lower_s > best and not whole)
        if hopeless and point not in needed:
            continue
        result = serve_chains(cluster, point.composition, "jffc", workload)
        point.simulated_s = result.mean_response_s
        best = min(best, point.simulated_s)


def _surrogate_c(task: ChainTask) -> int | None:
    found = least_surrogate(task, sizes_of(task))
    return None if found is None else found[0]


def _least(points: list[Point], label: str) -> int | None:
    best: Point | None = None
    least = math.inf
    for point in points:
        value = point.value(label)
        if value is not None and value < least * (1 - _TIED):
            best, least = point, value
    return None if best is None else best.c


def _at(points: tuple[Point, ...] | list[Point], c: int) -> Point:
    """Returns the placement that this c gives, too."""
    return max((point for point in points if point.c <= c), key=lambda point: point.c)
