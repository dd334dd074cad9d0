"""A cluster as its operators look at it: everything can be read here, and nothing be changed."""

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
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.observed.timelines import ResourceUse, TimelineEntry
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
    ServerId,
)
from catenary_services.domain.plan import Chain, ModelPlan


class ClusterView:
    """What one leader knows, at the moment it is asked."""

    def __init__(self, leader: LeaderRuntime) -> None:
        self._leader = leader

    # ---- the leader itself ----

    @property
    def scheduler_id(self) -> str:
        """Name of the process that leads."""
        return self._leader.settings.scheduler_id

    @property
    def group(self) -> int:
        """The scheduler group it leads."""
        return self._leader.group

    @property
    def epoch(self) -> Epoch:
        """The present fencing epoch."""
        return self._leader.epoch

    @property
    def redis_connected(self) -> bool:
        """False while Redis does not answer, or takes no writes."""
        return self._leader.write_behind.connected

    @property
    def redis_problem(self) -> str:
        """Why, in one line; empty while it does."""
        return self._leader.write_behind.problem

    @property
    def takeover_problems(self) -> list[str]:
        """What was left out when it began, for people."""
        return self._leader.takeover_problems

    @property
    def quarantined_records(self) -> int:
        """Stored records that could not be read when it began."""
        return self._leader.quarantined

    # ---- gateways and agents ----

    @property
    def gateways(self) -> list[GatewayState]:
        """Those that are there."""
        return self._leader.gateways.connected()

    @property
    def registry(self) -> Mapping[AgentId, AgentState]:
        """Every agent, there or not."""
        return self._leader.cluster.registry

    @property
    def servers(self) -> Mapping[AgentId, ServerId]:
        """The server of every agent that was ever seen."""
        return servers_of(self._leader.cluster.registry)

    def state_of(self, record: AgentState) -> str:
        """Returns for people: "joining", "ready", "draining" or "lost"."""
        return record.state(self._leader.availability)

    def troubles(self, agent: AgentId) -> Iterable[ImpairmentReport]:
        """Returns what speaks against giving an agent work."""
        return self._leader.availability.troubles(agent)

    def utilisation(self, agent: AgentId) -> float:
        """Returns the share of the last seconds in which an agent was busy, 0 to 1."""
        return self._leader.utilisation.ratio(agent)

    def slowdown(self, agent: AgentId) -> float:
        """Returns the mean of real by booked time of an agent; 0 if too little is known."""
        return self._leader.slowdowns.ratio(agent, now_ns())

    def batches_by_agent(self) -> Counter[AgentId]:
        """Returns how many batches have yet to be computed by each agent."""
        return self._leader.in_flight.by_agent()

    def caches(self) -> Iterator[Cache]:
        """Yields every key-value cache, with its slots by the book."""
        return iter(self._leader.slots.caches())

    def cached_tokens(self, agent: AgentId, partition: PartitionKey) -> int:
        """Returns the tokens an agent has cached for a partition, counted once per block."""
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
        """Returns a deployed model; the version may be empty."""
        return self._leader.deployments.resolve(name, version)

    def not_ready_reason(self, model: ModelKey) -> str:
        """Returns why a model is not ready; empty if it is."""
        return self._leader.cluster.reason(model)

    @property
    def active(self) -> ActivePlan | None:
        """The plan in force."""
        return self._leader.cluster.active

    @property
    def plan_models(self) -> tuple[ModelPlan, ...]:
        """The models of the plan in force."""
        return self.active.plan.models if self.active is not None else ()

    @property
    def plan_id(self) -> str:
        """Of the plan in force; empty without one."""
        return self._leader.cluster.plan_id

    @property
    def plan_notes(self) -> PlanProvenance | None:
        """How the desired plan came about."""
        return self._leader.cluster.desired.provenance

    @property
    def plan_problem(self) -> str:
        """Why there is no plan, or not the one there should be; empty if all is well."""
        return self._leader.cluster.desired.problem()

    @property
    def last_switch(self) -> RolloutReport | None:
        """The last change of plan that is over."""
        return self._leader.cluster.last_switch

    def switch_report(self) -> RolloutReport | None:
        """Returns the change of plan under way, else the last one."""
        return self._leader.cluster.switch_report()

    def planned_rate(self, model: ModelKey) -> float:
        """Returns the sessions per second that chains of a model were composed for."""
        return self._leader.planner.planned_rate(model)

    def latency_lines(self, model: ModelKey, chain: Chain) -> admin_pb2.LatencyLines | None:
        """Returns the latency lines of a chain; None if nothing is known."""
        return self._leader.sessions.latency.message(model, chain)

    # ---- requests, batches, sessions ----

    def statistics(self) -> Mapping[str, int]:
        """Returns what the dispatcher counted so far, and some figures of now."""
        return self._leader.dispatcher.statistics()

    def reservations(self) -> list[Reservation]:
        """Returns every reservation in the book."""
        return self._leader.dispatcher.snapshot()

    @property
    def held_requests(self) -> int:
        """Requests that wait for a model to be ready."""
        return len(self._leader.waiting)

    def queued(self, model: ModelKey) -> int:
        """Returns how many requests wait for a model, or for one of its chains."""
        return self._leader.queued.of(model)

    @property
    def batches_in_flight(self) -> int:
        """How many batches are on their way."""
        return len(self._leader.in_flight)

    def is_in_flight(self, batch: BatchId) -> bool:
        """True while a batch is on its way."""
        return batch in self._leader.in_flight

    @property
    def sessions_in_flight(self) -> int:
        """How many sessions hold cache slots."""
        return len(self._leader.live)

    def sessions(self) -> list[SessionView]:
        """Returns every session the dispatcher knows."""
        return self._leader.moves.sessions()

    def sessions_by_model(self) -> Counter[ModelKey]:
        """Returns how many requests of each model have a session."""
        return self._leader.live.by_model()

    def sessions_by_chain(self) -> Counter[str]:
        """Returns how many sessions there are of each chain."""
        return self._leader.live.by_chain()

    def attainment(self, model: ModelKey) -> float:
        """Returns the share of a model's last sessions that met their objectives; -1 of none."""
        return self._leader.autoscaler.attainment(model, now_ns())

    @property
    def audits(self) -> int:
        """How many audits of the book are done."""
        return self._leader.audits.audits

    @property
    def leaks_mended(self) -> int:
        """How many leaks audits found that are gone."""
        return self._leader.audits.leaks_mended

    # ---- timelines ----

    def spans(self) -> list[ResourceUse]:
        """Returns what was generated of late."""
        return self._leader.timelines.spans()

    def batch_timelines(self) -> list[TimelineEntry]:
        """Returns the batches of late, oldest first."""
        return self._leader.timelines.batches()

    def has_timeline(self, batch: BatchId) -> bool:
        """True if a batch is among them."""
        return batch in self._leader.timelines

    def is_complete(self, since: Nanoseconds) -> bool:
        """True if nothing of the time since then had to be forgotten."""
        return self._leader.timelines.is_complete(since)
