"""Runs a scenario twice: in the simulator, and on real processes with the same plan and arrivals.

The simulator runs the cluster as it is; the processes run it dilated, with all arrival times
multiplied by the dilation. Load factors are searched for in the same way in both.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from catenary_lab.live.cluster import LiveCluster, running
from catenary_lab.live.dilation import dilate_plan, dilate_problem
from catenary_lab.live.load import LoadOutcome, Moments
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND
from catenary_simulator.arrivals import ArrivalProcess, PoissonArrivals, merged
from catenary_simulator.options import SIMULATED, SimulationOptions, offered_rps
from catenary_simulator.result import SimulationResult
from catenary_simulator.simulate import SimulationSetup, run, set_up

Progress = Callable[[str], None]
SAFETY_MARGIN_MS = 10.0
"""Time by which batches leave before the last moment, for their way through the processes."""
_WARM_UP_FACTOR = 0.5
_WARM_UP_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class LiveTask:
    """The models to serve, and for how long and how slowly."""

    problem: PoolingProblem
    plan: PooledPlan
    dilation: float
    duration_s: float
    """Duration of a run on the wall clock; the simulated one is shorter by the dilation."""
    warm_up_s: float
    reply_allowance_ms: float
    """Part of the SLO, before dilation, that clients reserve for the way of the result back to
    them."""

    def base_rps(self) -> dict[str, float]:
        """Returns the rate that the plan promises each model, which is load factor 1."""
        return {each.name: each.weight * self.plan.objective for each in self.problem.models}


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """The load factors to try."""

    target: float
    step: float
    highest: float
    most_runs: int
    """Largest number of runs on real processes for each seed."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The figures of one load on real processes and in the simulator."""

    seed: int
    load_factor: float
    simulated: SimulationResult
    live: LoadOutcome
    cpu_cores: float
    """CPU cores that all processes of the cluster used on average, without the load generator."""


@dataclass(frozen=True, slots=True)
class LiveFindings:
    """All runs, and the largest load factors by seed and model."""

    processes: int
    agents: int
    runs: tuple[LiveRun, ...]
    simulated: Mapping[tuple[int, str], float]
    live: Mapping[tuple[int, str], float]


async def largest_factors(
    held_at: Callable[[float], Awaitable[list[str]]],
    names: list[str],
    begin: float,
    wanted: SearchPlan,
) -> dict[str, float]:
    """Returns the largest load factor each model holds: up from `begin` if all do, else down.

    The search goes up only while every model holds the factor; a model that fails at a factor is
    not tried at a larger one. A model that held none within `wanted.most_runs` runs has 0.

    Args:
        held_at: Serves a factor; returns the models that held it.
        names: Names of the models.
        begin: Load factor to begin with: the one that the simulator found.
        wanted: Limits of the search.
    """
    factor = max(wanted.step, begin)
    held = dict.fromkeys(await held_at(factor), factor)
    upwards = len(held) == len(names)
    for _ in range(wanted.most_runs - 1):
        factor = round(factor + (wanted.step if upwards else -wanted.step), 6)
        if not wanted.step <= factor <= wanted.highest:
            break
        now = dict.fromkeys(await held_at(factor), factor)
        held = {**held, **now} if upwards else {**now, **held}
        if len(now) < len(names) if upwards else len(held) == len(names):
            break
    return {name: held.get(name, 0.0) for name in names}


class LiveScenario:
    """One task in the simulator and on real processes."""

    def __init__(self, task: LiveTask, wanted: SearchPlan) -> None:
        self._task = task
        self._wanted = wanted
        self._setting: SimulationSetup = set_up(task.problem, task.plan)
        self._names = [model.model.name for model in self._setting.plan.models]
        self._simulations: dict[tuple[int, float], SimulationResult] = {}
        self._runs: list[LiveRun] = []

    async def compare(self, seeds: list[int], folder: Path, progress: Progress) -> LiveFindings:
        """Returns the load factors of all seeds, simulated and live."""
        task = self._task
        problem = dilate_problem(task.problem, task.dilation)
        dilated = set_up(problem, dilate_plan(task.plan, task.dilation))
        simulated = {}
        for seed in seeds:
            simulated.update({(seed, name): f for name, f in self._simulate(seed).items()})
        live: dict[tuple[int, str], float] = {}
        started = time.monotonic()
        async with running(
            problem,
            dilated.agents,
            dilated.plan,
            folder,
            scheduler={"max_linger_ms": "inf", "safety_margin_ms": SAFETY_MARGIN_MS},
            progress=progress,
        ) as cluster:
            progress(f"{cluster.processes} processes after {time.monotonic() - started:.0f} s")
            await self._warm_up(cluster)
            for seed in seeds:
                begin = max(simulated[seed, name] for name in self._names)
                found = await largest_factors(
                    partial(self._try, cluster, seed, progress), self._names, begin, self._wanted
                )
                live.update({(seed, name): factor for name, factor in found.items()})
            agents = len(dilated.agents)
            return LiveFindings(cluster.processes, agents, tuple(self._runs), simulated, live)

    # Simulated

    def simulation(self, seed: int, factor: float) -> SimulationResult:
        """Returns a run of the simulator, which is made once per seed and factor."""
        known = self._simulations.get((seed, factor))
        if known is None:
            margin_ns = SAFETY_MARGIN_MS * NANOSECONDS_PER_MILLISECOND / self._task.dilation
            options = SimulationOptions(
                self._task.base_rps(),
                factor,
                self._task.duration_s / self._task.dilation,
                seed,
                config=replace(SIMULATED, safety_margin_ns=round(margin_ns)),
            )
            known = self._simulations[seed, factor] = run(self._setting, options)
        return known

    def _simulate(self, seed: int) -> dict[str, float]:
        """Returns the largest factor per model, tried from the highest down."""
        wanted = self._wanted
        found: dict[str, float] = {}
        for number in range(round(wanted.highest / wanted.step), 0, -1):
            factor = round(number * wanted.step, 6)
            for model in self.simulation(seed, factor).models:
                if model.attainment >= wanted.target:
                    found.setdefault(model.name, factor)
            if len(found) == len(self._names):
                break
        return {name: found.get(name, 0.0) for name in self._names}

    # Live

    def _moments(self, seed: int, factor: float, seconds: float) -> Moments:
        """Returns the simulator's arrivals, dilated."""
        base = self._task.base_rps()
        processes: list[tuple[ArrivalProcess, float]] = [
            (PoissonArrivals(), offered_rps(base[name], factor)) for name in self._names
        ]
        moments, owners = merged(processes, seconds / self._task.dilation, seed)
        found: dict[str, list[float]] = {name: [] for name in self._names}
        for moment, owner in zip(moments, owners, strict=True):
            dilated = moment / NANOSECONDS_PER_SECOND * self._task.dilation
            found[self._names[owner]].append(dilated)
        return found

    async def _warm_up(self, cluster: LiveCluster) -> None:
        moments = self._moments(_WARM_UP_SEED, _WARM_UP_FACTOR, self._task.warm_up_s)
        await cluster.serve(moments, 0.0)

    async def _try(
        self, cluster: LiveCluster, seed: int, progress: Progress, factor: float
    ) -> list[str]:
        """Serves one factor; returns the models that held it."""
        task = self._task
        moments = self._moments(seed, factor, task.duration_s)
        before = cluster.cpu_seconds()
        outcome = await cluster.serve(moments, task.reply_allowance_ms * task.dilation)
        cores = (cluster.cpu_seconds() - before) / task.duration_s
        simulated = self.simulation(seed, factor)
        self._runs.append(LiveRun(seed, factor, simulated, outcome, cores))
        shares = ", ".join(
            f"{name} {100 * outcome.models[name].attainment:.2f} %"
            f" ({100 * simulated.model(name).attainment:.2f} %)"
            for name in self._names
        )
        progress(f"seed {seed}, load factor {factor:.2f}: {shares} in time, live (simulated)")
        return [
            name for name in self._names if outcome.models[name].attainment >= self._wanted.target
        ]
