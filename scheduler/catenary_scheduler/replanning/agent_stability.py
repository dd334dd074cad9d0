"""Chooses the agents to plan with, without haste.

A new agent is used after a quiet moment, as others may be about to come. A lost one is waited for:
it is probably being restarted, and loading its partitions again is quicker than moving them all.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from catenary_scheduler.agents.registry import AgentRegistry, is_draining, staying
from catenary_scheduler.dispatch.availability import Availability
from catenary_services.domain.ids import AgentId


@dataclass(frozen=True, slots=True)
class AgentStability:
    """Waiting times before a plan is made for agents that came or went."""

    settle_s: float = 1.0
    replan_after_s: float = 5.0
    expected_agents: int = 1


def eligible(
    registry: AgentRegistry,
    availability: Availability,
    planned: Set[AgentId],
    stability: AgentStability,
    *,
    started_s: float,
    now_s: float,
) -> frozenset[AgentId]:
    """Returns the agents that a plan may use.

    They are those that are connected, and those of the present plan that may come back.
    """
    return frozenset(record.agent.agent_id for record in staying(registry, availability)) | {
        agent
        for agent in planned
        if _is_gone(registry, agent)
        and not is_draining(agent, availability)
        and now_s - _gone_since_s(registry, agent, started_s) < stability.replan_after_s
    }


def is_settled(
    registry: AgentRegistry,
    planned: Set[AgentId],
    agents: Set[AgentId],
    stability: AgentStability,
    now_s: float,
) -> bool:
    """True if no agent connected a moment ago, and every expected agent has been heard of."""
    came_s = [
        record.since_s
        for agent, record in registry.items()
        if record.session is not None and agent in agents and agent not in planned
    ]
    unseen = agents - registry.keys()  # after a change of leader; they are about to report
    return not unseen and now_s - max(came_s, default=0.0) >= stability.settle_s


def _is_gone(registry: AgentRegistry, agent: AgentId) -> bool:
    record = registry.get(agent)
    return record is None or record.session is None


def _gone_since_s(registry: AgentRegistry, agent: AgentId, started_s: float) -> float:
    record = registry.get(agent)
    return started_s if record is None else record.since_s
