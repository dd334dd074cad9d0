"""How long a mean session takes on a path through a model, by what is known at this moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.deployments import Deployments
from scheduler.measured import Measured
from scheduler.planning import ServiceTime
from scheduler.planning.live import ChainCosts, SessionShape
from scheduler.roster import Roster
from services.domain.ids import ModelKey, Nanoseconds
from services.domain.plan import ChainHop
from services.errors import PlanInfeasible

Shapes = Callable[[ModelKey], SessionShape]


def service_times(
    deployments: Deployments, measured: Measured, roster: Roster, shape: Shapes
) -> ServiceTime:
    """Returns a function for the chains of any deployed model that generates text."""
    agents = [record.agent for record in roster.values()]
    times = measured.generation()
    costs: dict[ModelKey, ChainCosts] = {}

    def service_ns(model: ModelKey, hops: Sequence[ChainHop]) -> Nanoseconds:
        if model not in costs:
            deployment = deployments.ready.get(model)
            if deployment is None or deployment.decoder is None:
                raise PlanInfeasible(f"{model}: has chains and does not generate text")
            costs[model] = ChainCosts(deployment.decoder, agents, times, model, shape(model))
        return costs[model].service_ns(hops)

    return service_ns
