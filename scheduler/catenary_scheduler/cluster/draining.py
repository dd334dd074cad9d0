"""When an agent that is to go may go, and what is done about its sessions until then.

Its sessions move to other chains at once, before there is a plan without it. It need not wait for
that plan either: an agent that holds nothing, and without which every model is served, is idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.registry import is_draining
from catenary_scheduler.agents.sender import AgentSender
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.cluster.drain_marks import DrainMarks
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.inflight.batches import InFlightBatches
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_services.domain.ids import AgentId, Epoch, Nanoseconds
from catenary_services.domain.plan import Chain, ModelPlan


@dataclass(frozen=True, slots=True)
class DrainingDeps:
    """What draining looks at, and whom it tells."""

    cluster: ClusterController
    availability: Availability
    marks: DrainMarks
    in_flight: InFlightBatches
    live: LiveSessions
    agents: AgentSender
    epoch: Callable[[], Epoch]
    heed: Callable[[], None]
    """Has the dispatcher act on what changed of the availability."""


class Draining:
    """Drains the agents of a cluster, one or several at a time."""

    def __init__(self, deps: DrainingDeps) -> None:
        self._deps = deps

    def begin(self, agent: AgentId) -> None:
        """Has an agent be used no more: nothing begins there, and its sessions move away."""
        self.mark(agent)
        self._deps.cluster.reconcile(time.monotonic())

    def mark(self, agent: AgentId) -> None:
        """Has sessions leave an agent at once; `reconcile` must follow."""
        self._deps.availability.impair(agent, Impairment.DRAINING, why="it is to go")
        self._deps.heed()

    def take_back(self, agent: AgentId) -> None:
        """Has an agent that was to go be used again; sessions that have left do not come back."""
        self._deps.availability.clear(agent, Impairment.DRAINING)
        self._deps.marks.taken_back(agent)
        self._deps.cluster.reconcile(time.monotonic())

    def is_idle(self, agent: AgentId) -> bool:
        """True if an agent has nothing left to do: it holds nothing, all is served without it."""
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
        """Goes on with what a predecessor began."""
        for agent in self._deps.marks.due():
            self.begin(agent)
        for agent in self._deps.marks.done(self.is_idle):
            self.tell_drained(agent)

    def _needs(self, model: ModelPlan, agent: AgentId) -> bool:
        """True while requests for a model may be sent to an agent that is to go."""
        if any(agent in stage.agents for line in model.pipelines for stage in line.stages):
            return True  # batches are, until there is a plan without it
        if not any(hop.agent == agent for chain in model.chains for hop in chain.hops):
            return False
        return not any(self._serves(chain) for chain in model.chains)

    def _serves(self, chain: Chain) -> bool:
        """True if sessions may begin on a chain whatever agents are to go."""
        availability = self._deps.availability
        return all(
            availability.can_serve(hop.agent, hop.partition)
            and not is_draining(hop.agent, availability)
            for hop in chain.hops
        )
