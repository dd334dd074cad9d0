"""A read-only view of a cluster for its operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.agents.deployments import Deployment
from catenary_scheduler.agents.registry import AgentState, servers_of
from catenary_scheduler.book import Reservation
from catenary_scheduler.book.caches import Cache
from catenary_scheduler.cluster.active_plan import ActivePlan
from catenary_scheduler.dispatch.availability import ImpairmentReport
from catenary_scheduler.dispatch.chained.sessions.views import SessionView
from catenary_scheduler.dispatch.chained.tracking import StoryStep
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.observed.links import MeasuredLink
from catenary_scheduler.observed.timelines import ResourceUse, TimelineEntry
from catenary_scheduler.planning.live import ServerPair
from catenary_scheduler.replanning.provenance import PlanProvenance
from catenary_scheduler.rollout.report import RolloutReport
from catenary_scheduler.rpc.gateway_registry import GatewayState
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    Epoch,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    RequestId,
    ServerId,
    SessionId,
)
from catenary_services.domain.plan import Agent, Chain, ModelPlan


class ClusterView:
    """The knowledge of one leader. Each property and method reads the present state anew."""

    def __init__(self, leader: LeaderRuntime) -> None:
        self._leader = leader

    # ---- the leader itself ----

    @property
    def scheduler_id(self) -> str:
        """Name of the scheduler process that leads."""
        return self._leader.settings.scheduler_id

    @property
    def group(self) -> int:
        return self._leader.group

    @property
    def epoch(self) -> Epoch:
        """The present fencing epoch of the leader."""
        return self._leader.epoch

    @property
    def redis_connected(self) -> bool:
        """True while Redis answers and takes writes."""
        return self._leader.write_behind.connected

    @property
    def redis_problem(self) -> str:
        return self._leader.write_behind.problem

    @property
    def takeover_problems(self) -> list[str]:
        return self._leader.takeover_problems

    @property
    def quarantined_records(self) -> int:
        """Number of stored records that the leader could not read at its start."""
        return self._leader.quarantined

    # ---- gateways and agents ----

    @property
    def gateways(self) -> list[GatewayState]:
        """The connected gateways."""
        return self._leader.gateways.connected()

    @property
    def registry(self) -> Mapping[AgentId, AgentState]:
        """Every agent the leader knows, connected or not."""
        return self._leader.cluster.registry

    @property
    def servers(self) -> Mapping[AgentId, ServerId]:
        """The server of every agent in the registry."""
        return servers_of(self._leader.cluster.registry)

    def links(self) -> Iterator[tuple[ServerPair, MeasuredLink]]:
        """Yields the measured links between servers of agents in the registry."""
        servers = set(self.servers.values())
        for pair, link in self._leader.measured.links.all():
            if servers.issuperset(pair):
                yield pair, link

    def seen(self, agent: Agent) -> Agent:
        """Returns an agent with the rate of its network card as far as it was measured."""
        (seen,) = self._leader.measured.links.known.seen((agent,))
        return seen

    def state_of(self, record: AgentState) -> str:
        """Returns the state of an agent in one word: "joining", "ready", "draining" or "lost"."""
        return record.state(self._leader.availability)

    def impairments(self, agent: AgentId) -> Iterable[ImpairmentReport]:
        """Returns the reasons not to give an agent work."""
        return self._leader.availability.impairments(agent)

    def utilisation(self, agent: AgentId) -> float:
        """Returns the share of the last seconds in which an agent was busy, 0 to 1."""
        return self._leader.utilisation.ratio(agent)

    def slowdown(self, agent: AgentId) -> float:
        """Returns the recent ratio of real to booked time of an agent; 0 if too little is known."""
        return self._leader.slowdowns.ratio(agent, now_ns())

    def batches_by_agent(self) -> Counter[AgentId]:
        """Returns how many batches have yet to be computed by each agent."""
        return self._leader.in_flight.by_agent()

    def caches(self) -> Iterator[Cache]:
        """Yields every key-value cache, with the slots that the book counts."""
        return iter(self._leader.slots.caches())

    def cached_tokens(self, agent: AgentId, partition: PartitionKey) -> int:
        """Returns how many tokens an agent has cached for a partition, counted once per block."""
        return self._leader.sessions.cached_at(agent, partition)

    # ---- models and plans ----

    @property
    def deployed(self) -> Mapping[ModelKey, Deployment]:
        """The models that can be served."""
        return self._leader.deployments.ready

    @property
    def undeployed(self) -> Mapping[str, str]:
        """The models that cannot be served, by reference, with the reason in words."""
        return self._leader.deployments.problems

    def resolve(self, name: str, version: str) -> ModelKey | None:
        """Returns a deployed model, of the highest version if `version` is empty; else None."""
        return self._leader.deployments.resolve(name, version)

    def not_ready_reason(self, model: ModelKey) -> str:
        return self._leader.cluster.reason(model)

    @property
    def active(self) -> ActivePlan | None:
        """The plan in force; None without one."""
        return self._leader.cluster.active

    @property
    def plan_models(self) -> tuple[ModelPlan, ...]:
        """The models of the plan in force; none without a plan."""
        return self.active.plan.models if self.active is not None else ()

    @property
    def plan_id(self) -> str:
        """Id of the plan in force; empty without one."""
        return self._leader.cluster.plan_id

    @property
    def provenance(self) -> PlanProvenance | None:
        """The planner that made the desired plan, with its reasons; None if unknown."""
        return self._leader.cluster.desired.provenance

    @property
    def planned_agents(self) -> frozenset[AgentId]:
        """The agents that the planner made its last proposal for, used or idle in it."""
        return self._leader.planner.planned_agents

    @property
    def plan_problem(self) -> str:
        """The reason why the desired plan is missing or not in force; empty if all is well."""
        return self._leader.cluster.desired.problem()

    @property
    def last_switch(self) -> RolloutReport | None:
        """The last change of plan that has ended; None if there was none."""
        return self._leader.cluster.last_switch

    def rollout_report(self) -> RolloutReport | None:
        """Returns the change of plan under way, else the last one; None if there was none."""
        return self._leader.cluster.rollout_report()

    def planned_rate(self, model: ModelKey) -> float:
        """Returns the sessions per second that the chains of a model were composed for."""
        return self._leader.planner.planned_rate(model)

    def latency_lines(self, model: ModelKey, chain: Chain) -> admin_pb2.LatencyLines | None:
        return self._leader.sessions.latency.message(model, chain)

    # ---- requests, batches, sessions ----

    def statistics(self) -> Mapping[str, int]:
        """Returns the counters of the dispatcher, and some figures of the moment, by name."""
        return self._leader.dispatcher.statistics()

    def reservations(self) -> list[Reservation]:
        return self._leader.dispatcher.snapshot()

    @property
    def held_requests(self) -> int:
        """Number of requests that wait for a model to be ready."""
        return len(self._leader.waiting.requests)

    def queued(self, model: ModelKey) -> int:
        """Returns how many requests wait for a model, or for one of its chains."""
        return self._leader.queued.of(model)

    @property
    def batches_in_flight(self) -> int:
        return len(self._leader.in_flight)

    def is_in_flight(self, batch: BatchId) -> bool:
        return batch in self._leader.in_flight

    @property
    def sessions_in_flight(self) -> int:
        """Number of sessions that hold cache slots."""
        return len(self._leader.live)

    def sessions(self) -> list[SessionView]:
        """Returns every session the dispatcher knows."""
        return self._leader.moves.sessions()

    def story(self, key: RequestId | SessionId) -> list[StoryStep]:
        """Returns what happened to a request and its sessions; empty if it is not known."""
        return self._leader.dispatcher.chained.story(key)

    def sessions_by_model(self) -> Counter[ModelKey]:
        """Returns the number of requests of each model that have a session."""
        return self._leader.live.by_model()

    def sessions_by_chain(self) -> Counter[str]:
        return self._leader.live.by_chain()

    def attainment(self, model: ModelKey) -> float:
        """Returns the share of a model's last sessions that met their objectives; -1 if none."""
        return self._leader.autoscaler.attainment(model, now_ns())

    @property
    def audits(self) -> int:
        """Number of finished audits of the book."""
        return self._leader.audits.audits

    @property
    def leaks_mended(self) -> int:
        """Number of leaks in the book that audits found and that are gone."""
        return self._leader.audits.leaks_mended

    # ---- timelines ----

    def spans(self) -> list[ResourceUse]:
        """Returns the remembered stretches of text generation."""
        return self._leader.timelines.spans()

    def batch_timelines(self) -> list[TimelineEntry]:
        """Returns the remembered batches, oldest first."""
        return self._leader.timelines.batches()

    def has_timeline(self, batch: BatchId) -> bool:
        return batch in self._leader.timelines

    def is_complete(self, since: Nanoseconds) -> bool:
        """True if everything since that moment is still remembered."""
        return self._leader.timelines.is_complete(since)
