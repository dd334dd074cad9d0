"""The load that a placement takes within the objectives, by the block times of a planning task.

Routes through pools of other models promise nothing and do not count. Own pipelines may share
agents, too: every agent divides its time among the stages it is in so that the
models together take as much of the load as possible. That is a small linear program, in which
agents that are alike (one class, the same stages) are one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import highspy
import numpy as np

from catenary_scheduler.planning.placement import PipelinePlacement, Placement
from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    Microseconds,
    PooledModel,
    PoolingProblem,
)
from catenary_scheduler.planning.pooled.timing import transfer_us
from catenary_services.domain.ids import AgentId

_Stage = tuple[int, int]
"""A pipeline, counted over all models, and the position of a stage in it."""
Groups = Mapping[AgentId, str]
"""The class of every agent, as the planning task names it."""


@dataclass(frozen=True, slots=True)
class PlacementThroughput:
    """The load that a placement takes."""

    objective: float
    """Least throughput over share of the load, in requests per second."""
    throughput_rps: Mapping[str, float]
    """Throughput of each model, by name."""
    latency_us: Mapping[str, Microseconds]
    """Latency of a batch of the slowest pipeline in time, by name of the model; models without such
    a pipeline are missing."""
    in_time: Placement
    """The placement without the pipelines that cannot keep the objective with its margin."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """A pipeline that is in time."""

    model: int
    placed: PipelinePlacement
    batch: int
    latency_us: Microseconds
    stage_us: tuple[Microseconds, ...]


def promise_of(
    problem: PoolingProblem, placement: Placement, groups: Groups
) -> PlacementThroughput:
    """Returns what a placement of the task's models promises."""
    models = {model.name: (at, model) for at, model in enumerate(problem.models)}
    classes = {gpu.name: gpu for gpu in problem.classes}
    pipelines: list[_Timed] = []
    kept = []
    for placed in placement.models:
        at, model = models[str(placed.model)]
        own = [each for each in placed.pipelines if not each.is_shared]
        timed = [_timed(at, model, each, groups, classes) for each in own]
        good = [each for each in timed if each is not None]
        pipelines += good
        kept.append(replace(placed, pipelines=tuple(each.placed for each in good)))
    rates = _rates(problem, pipelines, groups)
    throughput = {model.name: 0.0 for model in problem.models}
    latency: dict[str, Microseconds] = {}
    for pipeline, rate in zip(pipelines, rates, strict=True):
        name = problem.models[pipeline.model].name
        throughput[name] += rate
        latency[name] = max(latency.get(name, 0.0), pipeline.latency_us)
    objective = min(throughput[model.name] / model.weight for model in problem.models)
    return PlacementThroughput(
        objective,
        throughput,
        latency,
        Placement(tuple(kept)),
    )


def _timed(
    at: int,
    model: PooledModel,
    placed: PipelinePlacement,
    groups: Groups,
    classes: Mapping[str, GpuClass],
) -> _Timed | None:
    """Returns a pipeline with the largest batch that is in time; None if no batch is."""
    pools = [{groups[agent] for agent in stage.agents} for stage in placed.stages]
    times = []
    for stage, pool in zip(placed.stages, pools, strict=True):
        blocks = slice(stage.first_block, stage.last_block)
        # A pool is booked at the pace of its slowest member.
        times.append(np.maximum.reduce([model.latency_us[g, 1][blocks].sum(axis=0) for g in pool]))
    row_us = 0.0
    for stage, sending, receiving in zip(placed.stages[1:], pools, pools[1:], strict=False):
        cut = model.cut_bytes[stage.first_block]
        pairs = [(classes[one], classes[other]) for one in sending for other in receiving]
        row_us += max(transfer_us(cut, one, other) for one, other in pairs)
    sizes = min(placed.batch_size, *(len(each) for each in times))
    for batch in range(sizes, 0, -1):
        stage_us = tuple(float(each[batch - 1]) for each in times)
        latency_us = sum(stage_us) + batch * row_us
        if latency_us <= model.slo_us - model.margin_us:
            return _Timed(at, placed, batch, latency_us, stage_us)
    return None


def _rates(problem: PoolingProblem, pipelines: list[_Timed], groups: Groups) -> list[float]:
    """Returns the requests per second of every pipeline, where the objective is largest."""
    if {each.model for each in pipelines} != set(range(len(problem.models))):
        return [0.0] * len(pipelines)
    stages_of: dict[AgentId, list[_Stage]] = {}
    for number, pipeline in enumerate(pipelines):
        for position, stage in enumerate(pipeline.placed.stages):
            for agent in stage.agents:
                stages_of.setdefault(agent, []).append((number, position))
    alike = Counter((groups[agent], tuple(stages)) for agent, stages in stages_of.items())
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    load = solver.addVariable(obj=-1.0)
    rates = [solver.addVariable() for _ in pipelines]
    shared: dict[_Stage, list[highspy.highs.highs_var]] = {}
    for (_, stages), count in sorted(alike.items()):
        parts = []
        for number, position in stages:
            part = solver.addVariable()
            shared.setdefault((number, position), []).append(part)
            pipeline = pipelines[number]
            parts.append(part * (pipeline.stage_us[position] / pipeline.batch / 1e6))
        solver.addConstr(sum(parts[1:], parts[0]) <= float(count))
    for (number, _), parts in shared.items():
        solver.addConstr(sum(parts[1:], parts[0] * 1.0) - rates[number] >= 0.0)
    for at, model in enumerate(problem.models):
        own = [rate for rate, each in zip(rates, pipelines, strict=True) if each.model == at]
        solver.addConstr(sum(own[1:], own[0] * 1.0) - load * model.weight >= 0.0)
    solver.run()
    values = solver.getSolution().col_value
    return [float(values[rate.index]) for rate in rates]
