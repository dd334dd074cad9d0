"""When an agent that is to go may go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import scheduler_pb2
from scheduler import targets
from services.domain.ids import AgentId

if TYPE_CHECKING:
    from scheduler.term import Term


def is_idle(term: Term, agent_id: AgentId) -> bool:
    """True if an agent has nothing left to do: no plan has it, and it holds nothing."""
    active = term.cluster.active
    planned = active is not None and agent_id in targets.agents_of(active.placement)
    is_used = term.in_flight.uses_agent(agent_id) or term.live.uses_agent(agent_id)
    return not planned and not is_used


def tell_drained(term: Term, agent_id: AgentId) -> None:
    """Tells an agent that nothing more will be asked of it; it may be stopped, or be used again."""
    message = scheduler_pb2.SchedulerToAgentMessage(epoch=term.epoch, drain=scheduler_pb2.Drain())
    term.agents.send(agent_id, message)
