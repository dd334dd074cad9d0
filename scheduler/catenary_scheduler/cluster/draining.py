"""Drains agents that are to go: moves their sessions away, and says when they may stop.

Sessions move to other chains at once, before there is a plan without the agent. The agent need not
wait for that plan either: it is idle if it holds nothing and every model is served without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.registry import AgentSender, is_draining
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.cluster.drain_marks import DrainMarks
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.inflight.batches import InFlightBatches
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_services.domain.ids import AgentId, Epoch, Nanoseconds
from catenary_services.domain.plan import Chain, ModelPlan


@dataclass(frozen=True, slots=True)
class DrainingDeps:
    """The parts of a term that draining reads, and those it tells."""

    cluster: ClusterController
    availability: Availability
    marks: DrainMarks
    in_flight: InFlightBatches
    live: LiveSessions
    agents: AgentSender
    epoch: Callable[[], Epoch]
    heed: Callable[[], None]
    """Has the dispatcher act on a changed availability at once."""


class Draining:
    """Drains the agents of a cluster, one or several at a time."""

    def __init__(self, deps: DrainingDeps) -> None:
        self._deps = deps

    def begin(self, agent: AgentId) -> None:
        """Stops using an agent: nothing begins there any more, and its sessions move away."""
        self.mark(agent)
        self._deps.cluster.reconcile(time.monotonic())

    def mark(self, agent: AgentId) -> None:
        """Marks an agent as draining, so that sessions leave it; `reconcile` must follow."""
        self._deps.availability.impair(agent, Impairment.DRAINING, why="it is to go")
        self._deps.heed()

    def take_back(self, agent: AgentId) -> None:
        """Uses an agent that was to go again; sessions that have left do not come back."""
        self._deps.availability.clear(agent, Impairment.DRAINING)
        self._deps.marks.taken_back(agent)
        self._deps.cluster.reconcile(time.monotonic())

    def is_idle(self, agent: AgentId) -> bool:
        """Returns True if an agent holds nothing and every model is served without it."""
        is_used = self._deps.in_flight.uses_agent(agent) or self._deps.live.uses_agent(agent)
        active = self._deps.cluster.active
        models = active.plan.models if active is not None else ()
        return not is_used and not any(self._needs(model, agent) for model in models)

    def tell_drained(self, agent: AgentId) -> None:
        """Tells an agent that nothing more will be asked of it; it may be stopped or used again."""
        drain = scheduler_pb2.Drain()
        message = scheduler_pb2.SchedulerToAgentMessage(epoch=self._deps.epoch(), drain=drain)
        self._deps.agents.send(agent, message)

    def tick(self, now: Nanoseconds) -> None:
        """Continues the draining that an earlier leader began."""
        for agent in self._deps.marks.due():
            self.begin(agent)
        for agent in self._deps.marks.done(self.is_idle):
            self.tell_drained(agent)

    def _needs(self, model: ModelPlan, agent: AgentId) -> bool:
        """Returns True while requests for a model may be sent to an agent that is to go."""
        if any(agent in stage.agents for line in model.pipelines for stage in line.stages):
            return True  # batches may be sent to it until there is a plan without it
        if not any(hop.agent == agent for chain in model.chains for hop in chain.hops):
            return False
        return not any(self._serves(chain) for chain in model.chains)

    def _serves(self, chain: Chain) -> bool:
        """Returns True if sessions may begin on a chain, because none of its agents is to go."""
        availability = self._deps.availability
        return all(
            availability.can_serve(hop.agent, hop.partition)
            and not is_draining(hop.agent, availability)
            for hop in chain.hops
        )
