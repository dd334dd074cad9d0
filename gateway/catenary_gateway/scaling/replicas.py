"""The number of replicas of a StatefulSet of agents, by the scheduler's advice (pure).

Kubernetes numbers the pods of a StatefulSet from 0 and removes the highest number first. So the
answer is the highest number that is still needed, plus the agents to come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from catenary_protos.catenary.v1 import admin_pb2

_LOST = "lost"


@dataclass(frozen=True, slots=True)
class StatefulSetShare:
    """The agents of one StatefulSet.

    Attributes:
        prefix: The StatefulSet's name and a hyphen; an agent is named after its pod.
        growth: This StatefulSet's share of the agents to come or to go, 0 to 1.
    """

    prefix: str
    growth: float

    def ordinal(self, agent_id: str) -> int | None:
        """Returns an agent's pod number; None if it is not of this StatefulSet."""
        number = agent_id.removeprefix(self.prefix)
        is_ours = agent_id.startswith(self.prefix) and number.isdecimal()
        return int(number) if is_ours else None


def replicas_of(
    share: StatefulSetShare,
    advice: admin_pb2.ScalingAdvice,
    agents: Iterable[admin_pb2.AgentStatus],
) -> int:
    """Returns the number of replicas that there should be.

    An agent that the scheduler drains counts until it is empty, so that no pod is removed while it
    still has sessions. An empty agent below the highest number (drained by hand) still counts,
    because another pod would be removed in its place.

    Args:
        share: The agents of the StatefulSet.
        advice: The scheduler's present advice.
        agents: All agents that the scheduler knows, lost ones included.
    """
    drained = {each.agent_id for each in advice.retiring if each.drained}
    needed = {
        ordinal
        for agent in agents
        if agent.state != _LOST and agent.agent_id not in drained
        if (ordinal := share.ordinal(agent.agent_id)) is not None
    }
    top = max(needed, default=-1) + 1
    missing = advice.agents_wanted - advice.agents_now
    if missing >= 0:
        # Agents being drained are taken back first.
        missing = max(0, missing - sum(not each.drained for each in advice.retiring))
        # Agents that restart, or were drained below others, come back with their numbers.
        holes = top - len(needed)
        return top + max(0, math.ceil(missing * share.growth - 1e-9) - holes)
    if advice.drains_agents:
        return top  # surplus agents are drained first, and then do not count
    return max(0, top - math.floor(-missing * share.growth + 1e-9))
