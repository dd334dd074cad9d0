"""Routes of the active plan: pipelines with the pools of agents that should be given work.

A shared route is one through pools of other models, their *owners*. These are protected twice: no
batch of a guest is booked behind which a request of an owner that came at once would be late, and
guests get only time that was left over lately (`IdleTime`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from catenary_scheduler.book import Book, Path, PathHop, Pool, PoolChain, ProbeStage
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
)
from catenary_services.domain.model import TokenUnits
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline, Plan

_SAVED_FOR_NS = NANOSECONDS_PER_SECOND
"""Idle time is kept for guests for no longer than this."""


class IdleTime:
    """Time of a pool that nobody has used, which guests may use.

    It grows while the members idle, less the protected share of all time, and shrinks by what is
    booked, whosever batch it is. So an owner that uses its pools up to the unprotected share leaves
    nothing to guests, and one that was idle a lot for the last second.
    """

    __slots__ = ("_at", "_left_ns", "_members", "_protected_share")

    def __init__(self, members: int, protected_share: float, now: Nanoseconds) -> None:
        self._members = members
        self._protected_share = protected_share
        self._left_ns = 0.0
        self._at = now
        """Moment up to which time has been counted."""

    def left(self, now: Nanoseconds) -> float:
        """Returns the nanoseconds that guests may use."""
        if now > self._at:
            more = (now - self._at) * (1.0 - self._protected_share)
            most = float(_SAVED_FOR_NS)
            self._left_ns = min(most * self._members, self._left_ns + more * self._members)
            self._at = now
        return self._left_ns

    def spend(self, duration_ns: Nanoseconds, now: Nanoseconds) -> None:
        """Notes that a member was booked."""
        self._left_ns = max(0.0, self.left(now) - duration_ns)


class Route:
    """A pipeline of which every stage has an agent.

    Attributes:
        idle: The idle time of the pool of each stage; empty if no guest may use the pools.
        most_wait_ns: The longest wait of a batch on a shared route for everything that is booked.
        owners: The models whose pools a shared route uses.
    """

    __slots__ = (
        "batch_size",
        "chain",
        "idle",
        "is_shared",
        "most_wait_ns",
        "owners",
        "partitions",
        "pipeline_id",
        "units",
    )

    def __init__(
        self, pipeline: Pipeline, legs: Sequence[ProbeStage], units: TokenUnits | None = None
    ) -> None:
        self.pipeline_id = pipeline.pipeline_id
        self.is_shared = pipeline.is_shared
        self.idle: tuple[IdleTime, ...] = ()
        self.most_wait_ns: Nanoseconds = 0
        self.owners: tuple[ModelKey, ...] = ()
        self.units = units
        """The units of its batches, if the model is given texts; None: rows."""
        self.chain = PoolChain(legs)
        self.partitions: tuple[PartitionKey, ...] = tuple(s.partition for s in pipeline.stages)
        self.batch_size = min(pipeline.batch_size, self.chain.max_rows)

    def has_time_for(self, path: Path, now: Nanoseconds) -> bool:
        """Returns True if a guest's batch leaves the owners of the pools what is protected."""
        in_the_way = 0  # what an owner's request has to wait for besides, as no member is left
        for leg, idle, step in zip(self.chain.legs, self.idle, path.steps, strict=True):
            if idle.left(now) < step.compute_ns:
                return False
            if len(leg.pool.members) == 1:
                in_the_way = max(in_the_way, step.compute_ns)
        return path.wait_ns + in_the_way <= self.most_wait_ns

    def spend(self, steps: Sequence[PathHop], now: Nanoseconds) -> None:
        """Notes that a batch was booked."""
        for idle, step in zip(self.idle, steps, strict=True):
            idle.spend(step.compute_ns, now)


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

    def __init__(
        self, book: Book, availability: Availability, times: BookedTimes, protected_share: float
    ) -> None:
        self._book = book
        self._protected_share = protected_share
        self._shared: dict[ModelKey, tuple[Route, ...]] = {}
        self._idle: dict[tuple[AgentId, ...], IdleTime] = {}
        self._times = times
        self._availability = availability
        self._routes: dict[ModelKey, tuple[Route, ...]] = {}
        self._contenders: dict[ModelKey, tuple[ModelKey, ...]] = {}
        self._planned: dict[ModelKey, ModelPlan] = {}
        self._agents: Mapping[AgentId, Agent] = {}

    def rebuild(self, plan: Plan | None, agents: Mapping[AgentId, Agent], now: Nanoseconds) -> None:
        """Makes the routes of a plan on the agents that are there."""
        pools: dict[tuple[AgentId, ...], Pool] = {}
        self._planned = {model.model: model for model in (plan.models if plan else ())}
        self._agents = dict(agents)
        self._routes = {
            key: self._routes_of(model, model.own_pipelines, agents, pools)
            for key, model in self._planned.items()
        }
        self._shared = {
            key: self._routes_of(model, model.shared_pipelines, agents, pools)
            for key, model in self._planned.items()
        }
        self._protect(now)
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
        """Returns the routes of a model through pools of its own that can be used now."""
        return self._routes.get(model, ())

    def shared_of(self, model: ModelKey) -> tuple[Route, ...]:
        """Returns the routes of a model through pools of others that can be used now."""
        return self._shared.get(model, ())

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
        found = self._routes_of(planned, planned.own_pipelines, agents, pools)
        return OrderedRoutes(found, tuple(pools.values()))

    def contenders(self, model: ModelKey) -> tuple[ModelKey, ...]:
        """Returns the other models that use some of the same devices or links."""
        return self._contenders.get(model, ())

    def _protect(self, now: Nanoseconds) -> None:
        """Sets what guests have to leave to the owners of the pools that they share."""
        guests = [route for routes in self._shared.values() for route in routes]
        before, self._idle = self._idle, {}
        if not guests:
            return
        idle_of: dict[AgentId, IdleTime] = {}
        slack_of: dict[AgentId, Nanoseconds] = {}
        owners_of: dict[AgentId, set[ModelKey]] = {}
        for model, routes in self._routes.items():
            for route in routes:
                route.idle = tuple(
                    [self._idle_of(leg.pool, before, now) for leg in route.chain.legs]
                )
                least = route.chain.least_work_ns[route.batch_size - 1]
                slack = max(0, self._planned[model].slo_ns - least)
                for leg, idle in zip(route.chain.legs, route.idle, strict=True):
                    for agent in leg.pool.index_of:
                        idle_of.setdefault(agent, idle)
                        slack_of[agent] = min(slack, slack_of.get(agent, slack))
                        owners_of.setdefault(agent, set()).add(model)
        for route in guests:
            pools = [leg.pool for leg in route.chain.legs]
            firsts = [next(iter(pool.index_of)) for pool in pools]
            route.idle = tuple(
                [
                    idle_of.get(first) or self._idle_of(pool, before, now)
                    for first, pool in zip(firsts, pools, strict=True)
                ]
            )
            agents = [agent for pool in pools for agent in pool.index_of]
            slacks = [slack_of[agent] for agent in agents if agent in slack_of]
            route.most_wait_ns = min(slacks, default=_SAVED_FOR_NS)
            names = {each for agent in agents for each in owners_of.get(agent, ())}
            route.owners = tuple(sorted(names, key=str))

    def _idle_of(
        self, pool: Pool, before: Mapping[tuple[AgentId, ...], IdleTime], now: Nanoseconds
    ) -> IdleTime:
        """Returns the idle time of a pool, which outlives the routes it was counted for."""
        members = tuple(pool.index_of)
        if members not in self._idle:
            idle = before.get(members) or IdleTime(len(members), self._protected_share, now)
            self._idle[members] = idle
        return self._idle[members]

    def _routes_of(
        self,
        model: ModelPlan,
        pipelines: Sequence[Pipeline],
        agents: Mapping[AgentId, Agent],
        pools: dict[tuple[AgentId, ...], Pool],
    ) -> tuple[Route, ...]:
        """Returns the routes whose worst stage is the least impaired, if any is whole."""
        found: list[tuple[int, Route]] = []
        for pipeline in pipelines:
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
