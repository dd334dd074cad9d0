"""The load that no scheduler can exceed on a plan, even one that knows every arrival beforehand.

Of each pipeline only its slowest pool counts, at its best batch size, and all pools of a model are
one fluid: a request takes the same share of it whatever batch it is in. It must pass that pool in
the time that its deadline leaves beside the least work before and behind. Requests of a model have
windows of one length, so serving them in order, and dropping whoever would be late, serves the
most. Links, batches, and other stages are free of charge, so the bound is above what can be done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.domain.plan import ModelPlan, Pipeline
from catenary_simulator.load_factor import Search, capacity_rps, pool_rps
from catenary_simulator.options import SimulationOptions
from catenary_simulator.simulate import SimulationSetup, requests_of


def fluid_bound(
    setting: SimulationSetup, options: SimulationOptions, wanted: Search
) -> Mapping[str, float]:
    """Returns a load factor for each model that no scheduler exceeds, on the steps of a search."""
    found: dict[str, float] = {}
    for factor in wanted.factors(wanted.highest):
        requests = requests_of(setting.plan, replace(options, load=factor))
        for index, model in enumerate(setting.plan.models):
            name = model.model.name
            if name in found:
                continue
            pairs = zip(requests.arrived, requests.model_of, strict=True)
            arrived = [moment for moment, owner in pairs if owner == index]
            work_ns = NANOSECONDS_PER_SECOND / capacity_rps(model)
            if served_share(arrived, work_ns, window_ns(model)) >= wanted.target:
                found[name] = factor
    return found


def served_share(arrived: Sequence[Nanoseconds], work_ns: float, window_ns: Nanoseconds) -> float:
    """Returns the largest share of requests that a fluid completes, each within its window.

    Args:
        arrived: Moments from which the requests can be served, ascending.
        work_ns: Time of the whole fluid that a request takes.
        window_ns: Time in which each must be completed.
    """
    served, free = 0, 0.0
    for moment in arrived:
        end = max(float(moment), free) + work_ns
        if end <= moment + window_ns:
            served += 1
            free = end
    return served / len(arrived) if arrived else 1.0


def window_ns(model: ModelPlan) -> Nanoseconds:
    """Returns the time in which a request of a model passes the slowest pool of its pipeline."""
    around = [_around(pipeline) for pipeline in model.pipelines]
    return model.slo_ns - min(ahead for ahead, _ in around) - min(behind for _, behind in around)


def _around(pipeline: Pipeline) -> tuple[Nanoseconds, Nanoseconds]:
    """Returns the least work before and behind the slowest pool of a pipeline."""
    rates = [pool_rps(stage, pipeline.batch_size) for stage in pipeline.stages]
    at = rates.index(min(rates))
    least = [min(stage.compute_ns) for stage in pipeline.stages]
    return sum(least[:at]), sum(least[at + 1 :])
