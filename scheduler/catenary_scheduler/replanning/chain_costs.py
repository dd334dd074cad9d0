"""Durations of sessions and steps on a path through a model, from present measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import ChainLatency, ServiceTime
from catenary_scheduler.planning.latency import ClusterLines
from catenary_scheduler.planning.live import ChainCosts, SessionShape
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import ChainHop
from catenary_services.errors import PlanInfeasible

Shapes = Callable[[ModelKey], SessionShape]


def service_times(
    deployments: Deployments, measured: MeasuredProfiles, registry: AgentRegistry, shape: Shapes
) -> ServiceTime:
    """Returns a function that gives the service time of a session on a chain, in nanoseconds.

    Costs are the latest that agents reported, where they report.
    """
    agents = [record.agent for record in registry.values()]
    times = measured.generation()
    costs: dict[ModelKey, ChainCosts] = {}

    def service_ns(model: ModelKey, hops: Sequence[ChainHop]) -> Nanoseconds:
        if model not in costs:
            decoder, precision = _decoder(deployments, model)
            known = measured.links.known
            costs[model] = ChainCosts(
                decoder, agents, times, model, shape(model), precision, links=known
            )
        return costs[model].service_ns(hops)

    return service_ns


def latency_lines(
    deployments: Deployments, measured: MeasuredProfiles, registry: AgentRegistry
) -> ChainLatency:
    """Returns a function that gives the latency lines of a chain, None if they are unknown."""
    agents = [record.agent for record in registry.values()]
    times = measured.generation()
    found: dict[ModelKey, ClusterLines] = {}

    def lines(model: ModelKey, hops: Sequence[ChainHop]) -> LatencyLines | None:
        if model not in found:
            decoder, precision = _decoder(deployments, model)
            found[model] = ClusterLines(
                decoder,
                agents,
                times,
                model,
                precision=precision,
                links=measured.links.known,
            )
        return found[model].lines(hops)

    return lines


def _decoder(deployments: Deployments, model: ModelKey) -> tuple[DecoderTable, str]:
    deployment = deployments.ready.get(model)
    if deployment is None or deployment.decoder is None:
        raise PlanInfeasible(f"{model}: has chains and does not generate text")
    return deployment.decoder, deployment.manifest.precision
