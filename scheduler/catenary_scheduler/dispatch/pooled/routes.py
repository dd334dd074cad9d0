"""Routes of the active plan: pipelines with the pools of agents that should be given work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from catenary_scheduler.book import Book, Pool, PoolChain, ProbeStage
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from catenary_services.domain.model import TokenUnits
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline, Plan


class Route:
    """A pipeline of which every stage has an agent."""

    __slots__ = ("batch_size", "chain", "partitions", "pipeline_id", "units")

    def __init__(
        self, pipeline: Pipeline, legs: Sequence[ProbeStage], units: TokenUnits | None = None
    ) -> None:
        self.pipeline_id = pipeline.pipeline_id
        self.units = units
        """The units of its batches, if the model is given texts; None: rows."""
        self.chain = PoolChain(legs)
        self.partitions: tuple[PartitionKey, ...] = tuple(s.partition for s in pipeline.stages)
        self.batch_size = min(pipeline.batch_size, self.chain.max_rows)


class OrderedRoutes:
    """Routes for one decision: their pools are kept in order between `__enter__` and `__exit__`."""

    def __init__(self, routes: tuple[Route, ...], pools: tuple[Pool, ...]) -> None:
        self.routes = routes
        self._pools = pools

    def __enter__(self) -> OrderedRoutes:
        for pool in self._pools:
            pool.attach()
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.detach()


class RouteTable:
    """Routes of every model of a plan.

    They are made anew when the plan, the agents, their availability or their times change.
    """

    def __init__(self, book: Book, availability: Availability, times: BookedTimes) -> None:
        self._book = book
        self._times = times
        self._availability = availability
        self._routes: dict[ModelKey, tuple[Route, ...]] = {}
        self._contenders: dict[ModelKey, tuple[ModelKey, ...]] = {}
        self._planned: dict[ModelKey, ModelPlan] = {}
        self._agents: Mapping[AgentId, Agent] = {}

    def rebuild(self, plan: Plan | None, agents: Mapping[AgentId, Agent]) -> None:
        pools: dict[tuple[AgentId, ...], Pool] = {}
        self._planned = {model.model: model for model in (plan.models if plan else ())}
        self._agents = dict(agents)
        self._routes = {
            model.model: self._routes_of(model, agents, pools)
            for model in (plan.models if plan else ())
        }
        self._book.follow(pools.values())
        touched = {model: _resources(routes) for model, routes in self._routes.items()}
        self._contenders = {
            model: tuple(
                other for other in touched if other != model and touched[other] & touched[model]
            )
            for model in touched
        }

    def serves(self, model: ModelKey) -> bool:
        """True if the plan knows the model, whether or not its agents are alive."""
        return model in self._routes

    def of(self, model: ModelKey) -> tuple[Route, ...]:
        """Returns the routes of a model that can be used now."""
        return self._routes.get(model, ())

    def has_only_path(self, model: ModelKey) -> bool:
        """Returns True if the batches of a model can go one way only."""
        routes = self._routes.get(model, ())
        if len(routes) != 1:
            return False
        return all(len(leg.pool.members) == 1 for leg in routes[0].chain.legs)

    def avoiding(self, model: ModelKey, avoid: Set[AgentId]) -> OrderedRoutes:
        """Returns the present routes without the given agents; perhaps there are none."""
        pools: dict[tuple[AgentId, ...], Pool] = {}
        planned = self._planned.get(model)
        if planned is None:
            return OrderedRoutes((), ())
        agents = {agent: each for agent, each in self._agents.items() if agent not in avoid}
        return OrderedRoutes(self._routes_of(planned, agents, pools), tuple(pools.values()))

    def contenders(self, model: ModelKey) -> tuple[ModelKey, ...]:
        """Returns the other models that use some of the same devices or links."""
        return self._contenders.get(model, ())

    def _routes_of(
        self,
        model: ModelPlan,
        agents: Mapping[AgentId, Agent],
        pools: dict[tuple[AgentId, ...], Pool],
    ) -> tuple[Route, ...]:
        """Returns the routes whose worst stage is the least impaired, if any is whole."""
        found: list[tuple[int, Route]] = []
        for pipeline in model.pipelines:
            legs = []
            worst = 0
            for stage in pipeline.stages:
                there = dict.fromkeys([agent for agent in stage.agents if agent in agents])
                members = self._availability.members(stage.partition, there)
                if not members:
                    break
                worst = max(worst, self._availability.rank(members[0], stage.partition))
                if members not in pools:
                    pools[members] = Pool([self._book.member(agents[agent]) for agent in members])
                compute = self._times.booked(members, stage.partition, stage.compute_ns)
                legs.append(ProbeStage(pools[members], compute, stage.input_bytes))
            if legs and len(legs) == len(pipeline.stages):
                found.append((worst, Route(pipeline, legs, model.units)))
        least = min([worst for worst, _ in found], default=0)
        return tuple([route for worst, route in found if worst == least])


def _resources(routes: tuple[Route, ...]) -> set[str]:
    return {
        line.resource
        for route in routes
        for leg in route.chain.legs
        for member in leg.pool.members
        for line in (member.gpu, member.uplink, member.downlink)
    }
