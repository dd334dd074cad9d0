"""A simulation run: a plan on a cluster, arrivals, and the dispatcher that runs in service."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.dispatch.events import AgentJoined, Dispatcher, PlanActivated
from catenary_scheduler.planning.pooled.layout.layout import lay_out
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ServerId
from catenary_services.domain.plan import Agent, ModelPlan, Plan
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import merged
from catenary_simulator.core.devices import SimulatedDevice, SimulatedLink, StageCost
from catenary_simulator.core.noise import Noise, NoiseFactors
from catenary_simulator.core.requests import DROPPED, FINISHED, LATE, SimulatedRequests
from catenary_simulator.core.world import SimulatedCluster
from catenary_simulator.options import SimulatedDispatcher, SimulationOptions, offered_rps
from catenary_simulator.result import ModelResult, SimulationResult

_COMPUTE, _TRANSFER, _CLOCKS = range(3)
"""Numbers of the random streams: compute noise, transfer noise and clock errors."""
_WARM_UP_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """A cluster with a plan on it, made once and simulated many times."""

    agents: tuple[Agent, ...]
    plan: Plan
    gpus: dict[str, int]
    """Number of physical GPUs by class, used or not."""


def set_up(problem: PoolingProblem, plan: PooledPlan) -> SimulationSetup:
    """Returns the setup of a plan laid out on the problem's cluster."""
    agents, laid_out = lay_out(problem, plan)
    return SimulationSetup(agents, laid_out, {gpu.name: gpu.count for gpu in problem.classes})


def simulate(
    problem: PoolingProblem, plan: PooledPlan, options: SimulationOptions
) -> SimulationResult:
    """Lays out a plan, serves arrivals by it, and returns the results."""
    return run(set_up(problem, plan), options)


def run(
    setting: SimulationSetup,
    options: SimulationOptions,
    wrap: Callable[[Dispatcher], Dispatcher] | None = None,
) -> SimulationResult:
    """Runs a setup, and returns the results.

    Args:
        setting: The cluster with its plan.
        options: Load, arrivals, disturbances and dispatcher.
        wrap: Function that wraps the dispatcher, for instance to watch it; None: nothing does.

    Raises:
        InvalidInput: A model has no base rate.
    """
    duration_ns = round(options.duration_s * NANOSECONDS_PER_SECOND)
    requests = requests_of(setting.plan, options)
    disturbance = options.disturbance
    noise = Noise(
        NoiseFactors(
            disturbance.compute_cv,
            disturbance.straggler_probability,
            disturbance.straggler_factor,
            options.seed,
            _COMPUTE,
        ),
        NoiseFactors(disturbance.transfer_cv, 0.0, 1.0, options.seed, _TRANSFER),
        disturbance.report_delay_ns,
    )
    dispatcher = _dispatcher(setting, options)
    watched = wrap(dispatcher) if wrap else dispatcher
    world = SimulatedCluster(watched, _devices(setting, options), requests, noise, duration_ns)
    begin = time.thread_time()
    world.run()
    seconds = time.thread_time() - begin
    decisions = dispatcher.take_decision_times()
    times = np.percentile(decisions, (50, 99)) / 1000 if decisions else None
    return SimulationResult(
        _models(setting.plan, options, requests, world),
        _utilisation(setting, world, duration_ns),
        (float(times[0]), float(times[1])) if times is not None else None,
        world.told + world.ends,
        seconds,
        dispatcher.statistics(),
    )


def requests_of(plan: Plan, options: SimulationOptions) -> SimulatedRequests:
    """Returns the requests of a run, none of which has been served.

    Raises:
        InvalidInput: A model has no base rate.
    """
    processes = []
    for model in plan.models:
        base = options.base_rps.get(model.model.name)
        if base is None:
            raise InvalidInput("base_rps", f"no rate for {model.model.name}")
        processes.append((options.arrivals, offered_rps(base, options.load)))
    moments, owners = merged(processes, options.duration_s, options.seed)
    return SimulatedRequests(
        [model.model for model in plan.models],
        moments,
        owners,
        [model.slo_ns for model in plan.models],
    )


def _dispatcher(setting: SimulationSetup, options: SimulationOptions) -> SimulatedDispatcher:
    dispatcher = options.dispatcher(options.config, stopwatch=time.thread_time_ns)
    for agent in setting.agents:
        dispatcher.handle(AgentJoined(agent), 0)
    dispatcher.handle(PlanActivated(setting.plan), 0)
    return dispatcher


def _devices(
    setting: SimulationSetup, options: SimulationOptions
) -> dict[AgentId, SimulatedDevice]:
    random = np.random.default_rng((options.seed, _CLOCKS))
    most = options.disturbance.clock_error_ns
    uplinks: dict[ServerId, SimulatedLink] = {}
    downlinks: dict[ServerId, SimulatedLink] = {}
    errors: dict[ServerId, int] = {}
    devices: dict[AgentId, SimulatedDevice] = {}
    for agent in setting.agents:
        if agent.server not in errors:
            errors[agent.server] = int(random.integers(-most, most + 1))
        devices[agent.agent_id] = SimulatedDevice(
            agent.device_class,
            1.0 / agent.virtual_level,
            uplinks.setdefault(agent.server, SimulatedLink()),
            downlinks.setdefault(agent.server, SimulatedLink()),
            agent.link_bytes_per_second,
            errors[agent.server],
        )
    for model in setting.plan.models:
        _host(model, devices)
    return devices


def _host(model: ModelPlan, devices: dict[AgentId, SimulatedDevice]) -> None:
    for pipeline in model.pipelines:
        last = len(pipeline.stages) - 1
        for position, stage in enumerate(pipeline.stages):
            cost = StageCost(stage.compute_ns, stage.input_bytes, position == 0, position == last)
            for agent in stage.agents:
                devices[agent].costs[stage.partition] = cost


def _models(
    plan: Plan, options: SimulationOptions, requests: SimulatedRequests, world: SimulatedCluster
) -> tuple[ModelResult, ...]:
    arrived = np.array(requests.arrived, dtype=np.int64)
    owners = np.array(requests.model_of, dtype=np.int64)
    states = np.frombuffer(requests.state, dtype=np.uint8)
    finished = np.array(requests.finished_at, dtype=np.int64)
    results = []
    for index, model in enumerate(plan.models):
        counted = (owners == index) & (arrived >= _WARM_UP_NS)
        state = states[counted]
        took = (finished - arrived)[counted & (finished > 0)] / 1e6
        p50, p99 = np.percentile(took, (50, 99)) if len(took) else (None, None)
        name = model.model.name
        batches = world.batches[index]
        results.append(
            ModelResult(
                name,
                offered_rps(options.base_rps[name], options.load),
                options.load,
                len(state),
                int((state == FINISHED).sum()),
                int((state == LATE).sum()),
                int((state == DROPPED).sum()),
                None if p50 is None else float(p50),
                None if p99 is None else float(p99),
                world.rows_of[index] / batches if batches else None,
            )
        )
    return tuple(results)


def _utilisation(
    setting: SimulationSetup, world: SimulatedCluster, duration_ns: int
) -> dict[str, float]:
    busy = dict.fromkeys(setting.gpus, 0.0)
    for device in world.devices.values():
        busy[device.group] += device.busy_ns * device.share
    return {
        name: busy[name] / (count * duration_ns) if count else 0.0
        for name, count in setting.gpus.items()
    }
