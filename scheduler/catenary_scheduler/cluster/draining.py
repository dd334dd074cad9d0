"""When an agent that is to go may go, and what is done about its sessions until then.

Its sessions move to other chains at once, before there is a plan without it. It need not wait for
that plan either: an agent that holds nothing, and without which every model is served, is idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.registry import is_draining
from catenary_scheduler.dispatch.availability import Impairment
from catenary_services.domain.ids import AgentId
from catenary_services.domain.plan import Chain, ModelPlan

if TYPE_CHECKING:
    from catenary_scheduler.leadership.leader import LeaderRuntime


def begin_draining(leader: LeaderRuntime, agent_id: AgentId) -> None:
    """Has an agent be used no more: nothing begins there, and its sessions move away."""
    leader.agent_draining(agent_id)
    leader.reconcile()


def take_back(leader: LeaderRuntime, agent_id: AgentId) -> None:
    """Has an agent that was to go be used again; sessions that have left do not come back."""
    leader.availability.clear(agent_id, Impairment.DRAINING)
    leader.drains.taken_back(agent_id)
    leader.reconcile()


def is_idle(leader: LeaderRuntime, agent_id: AgentId) -> bool:
    """True if an agent has nothing left to do: it holds nothing, and all is served without it."""
    is_used = leader.in_flight.uses_agent(agent_id) or leader.live.uses_agent(agent_id)
    active = leader.cluster.active
    models = active.plan.models if active is not None else ()
    return not is_used and not any(_needs(leader, model, agent_id) for model in models)


def _needs(leader: LeaderRuntime, model: ModelPlan, agent_id: AgentId) -> bool:
    """True while requests for a model may be sent to an agent that is to go."""
    if any(agent_id in stage.agents for line in model.pipelines for stage in line.stages):
        return True  # batches are, until there is a plan without it
    if not any(hop.agent == agent_id for chain in model.chains for hop in chain.hops):
        return False
    return not any(_serves(leader, chain) for chain in model.chains)


def _serves(leader: LeaderRuntime, chain: Chain) -> bool:
    """True if sessions may begin on a chain whatever agents are to go."""
    availability = leader.availability
    return all(
        availability.can_serve(hop.agent, hop.partition)
        and not is_draining(hop.agent, availability)
        for hop in chain.hops
    )


def tell_drained(leader: LeaderRuntime, agent_id: AgentId) -> None:
    """Tells an agent that nothing more will be asked of it; it may be stopped, or be used again."""
    message = scheduler_pb2.SchedulerToAgentMessage(epoch=leader.epoch, drain=scheduler_pb2.Drain())
    leader.agents.send(agent_id, message)
