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

from catenary_lab.live.cluster import EMULATED, LiveCluster, Progress
from catenary_lab.live.dilation import dilate_plan, dilate_problem
from catenary_lab.live.emulation import agent_settings, plan_document, write_models, write_profiles
from catenary_lab.live.load import LoadOutcome, Moments, infer_all
from catenary_lab.scenarios.pools.schema import Live
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND
from catenary_services.models.model_repository import ModelRepository
from catenary_simulator.arrivals import ArrivalProcess, PoissonArrivals, merged
from catenary_simulator.options import SIMULATED, SimulationOptions, offered_rps
from catenary_simulator.result import SimulationResult
from catenary_simulator.simulate import SimulationSetup, run, set_up
from catenaryd.local.local_cluster import ClusterOptions

SAFETY_MARGIN_MS = 10.0
"""Time by which batches leave before the last moment, for their way through the processes."""
_WARM_UP_FACTOR = 0.5
_WARM_UP_SEED = 1_000_000


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
    wanted: Live,
) -> dict[str, float]:
    """Returns the largest load factor each model holds: up from `begin` if all do, else down.

    The search goes up only while every model holds the factor; a model that fails at a factor is
    not tried at a larger one. A model that held none within `wanted.runs` runs has 0.

    Args:
        held_at: Serves a factor; returns the models that held it.
        names: Names of the models.
        begin: Load factor to begin with: the one that the simulator found.
        wanted: The scenario, for the limits of the search.
    """
    factor = max(wanted.step, begin)
    held = dict.fromkeys(await held_at(factor), factor)
    upwards = len(held) == len(names)
    for _ in range(wanted.runs - 1):
        factor = round(factor + (wanted.step if upwards else -wanted.step), 6)
        if not wanted.step <= factor <= wanted.highest:
            break
        now = dict.fromkeys(await held_at(factor), factor)
        held = {**held, **now} if upwards else {**now, **held}
        if len(now) < len(names) if upwards else len(held) == len(names):
            break
    return {name: held.get(name, 0.0) for name in names}


class LiveScenario:
    """A plan in the simulator and on real processes, as a scenario asks for it."""

    def __init__(self, wanted: Live, problem: PoolingProblem, plan: PooledPlan) -> None:
        self._wanted = wanted
        self._problem = problem
        self._plan = plan
        self._setting: SimulationSetup = set_up(problem, plan)
        self._names = [model.model.name for model in self._setting.plan.models]
        # What the plan promises each model is load factor 1.
        self._base_rps = {each.name: each.weight * plan.objective for each in problem.models}
        self._simulations: dict[tuple[int, float], SimulationResult] = {}
        self._runs: list[LiveRun] = []

    async def compare(self, folder: Path, progress: Progress) -> LiveFindings:
        """Returns the load factors of all seeds, simulated and live."""
        seeds = self._wanted.seeds
        simulated = {}
        for seed in seeds:
            simulated.update({(seed, name): f for name, f in self._simulate(seed).items()})
        live: dict[tuple[int, str], float] = {}
        started = time.monotonic()
        async with self._cluster(folder).serving(progress) as cluster:
            progress(f"{cluster.processes} processes after {time.monotonic() - started:.0f} s")
            await self._serve(cluster, _WARM_UP_SEED, _WARM_UP_FACTOR, self._wanted.warm_up_s, 0.0)
            for seed in seeds:
                begin = max(simulated[seed, name] for name in self._names)
                found = await largest_factors(
                    partial(self._try, cluster, seed, progress), self._names, begin, self._wanted
                )
                live.update({(seed, name): factor for name, factor in found.items()})
            agents = cluster.options.agents
            return LiveFindings(cluster.processes, agents, tuple(self._runs), simulated, live)

    # Simulated

    def simulation(self, seed: int, factor: float) -> SimulationResult:
        """Returns a run of the simulator, which is made once per seed and factor."""
        known = self._simulations.get((seed, factor))
        if known is None:
            dilation = self._wanted.dilation
            margin_ns = SAFETY_MARGIN_MS * NANOSECONDS_PER_MILLISECOND / dilation
            options = SimulationOptions(
                self._base_rps,
                factor,
                self._wanted.duration_s / dilation,
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

    def _cluster(self, folder: Path) -> LiveCluster:
        """Returns a cluster of emulated agents, one for every virtual GPU, to serve the plan."""
        problem = dilate_problem(self._problem, self._wanted.dilation)
        dilated = set_up(problem, dilate_plan(self._plan, self._wanted.dilation))
        write_models(ModelRepository(folder / "models"), problem)
        agents = agent_settings(dilated.agents, write_profiles(folder / "profiles", problem))
        models = tuple(model.name for model in problem.models)
        return LiveCluster(
            ClusterOptions(len(agents), device="emulated:any", models=models, each_agent=agents),
            folder,
            EMULATED,
            {"max_linger_ms": "inf", "safety_margin_ms": SAFETY_MARGIN_MS},
            plan_document(dilated.plan),
        )

    async def _serve(
        self, cluster: LiveCluster, seed: int, factor: float, seconds: float, allowance_ms: float
    ) -> LoadOutcome:
        """Serves the simulator's arrivals, dilated."""
        dilation = self._wanted.dilation
        processes: list[tuple[ArrivalProcess, float]] = [
            (PoissonArrivals(), offered_rps(self._base_rps[name], factor)) for name in self._names
        ]
        moments: Moments = {name: [] for name in self._names}
        for moment, owner in zip(*merged(processes, seconds / dilation, seed), strict=True):
            moments[self._names[owner]].append(moment / NANOSECONDS_PER_SECOND * dilation)
        slo_ms = {each.name: each.slo_us * dilation / 1e3 for each in self._problem.models}
        return await infer_all(
            cluster.target, moments, slo_ms, allowance_ms * dilation, cluster.options.data_dir
        )

    async def _try(
        self, cluster: LiveCluster, seed: int, progress: Progress, factor: float
    ) -> list[str]:
        """Serves one factor; returns the models that held it."""
        wanted = self._wanted
        before = cluster.cpu_seconds()
        outcome = await self._serve(
            cluster, seed, factor, wanted.duration_s, wanted.reply_allowance_ms
        )
        cores = (cluster.cpu_seconds() - before) / wanted.duration_s
        simulated = self.simulation(seed, factor)
        self._runs.append(LiveRun(seed, factor, simulated, outcome, cores))
        shares = ", ".join(
            f"{name} {100 * outcome.models[name].attainment:.2f} %"
            f" ({100 * simulated.model(name).attainment:.2f} %)"
            for name in self._names
        )
        progress(f"seed {seed}, load factor {factor:.2f}: {shares} in time, live (simulated)")
        return [name for name in self._names if outcome.models[name].attainment >= wanted.target]
