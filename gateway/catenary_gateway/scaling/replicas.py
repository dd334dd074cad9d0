"""How many replicas a StatefulSet of agents should have, by what the scheduler advises (pure).

Kubernetes numbers the pods of a StatefulSet from 0 and takes the highest away first. So the answer
is the highest number that is still needed, and what is to come.
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
        prefix: Its name and a hyphen; an agent is named after its pod.
        growth: Share of the agents to come, or to go, that is this StatefulSet's.
    """

    prefix: str
    growth: float

    def ordinal(self, agent_id: str) -> int | None:
        """Returns an agent's number; None if it is none of these."""
        number = agent_id.removeprefix(self.prefix)
        is_ours = agent_id.startswith(self.prefix) and number.isdecimal()
        return int(number) if is_ours else None


def replicas_of(
    share: StatefulSetShare,
    advice: admin_pb2.ScalingAdvice,
    agents: Iterable[admin_pb2.AgentStatus],
) -> int:
    """Returns how many replicas there should be.

    An agent that the scheduler drains counts until it is empty: nobody's session is cut off by a
    pod that is taken away too early. One that is empty but not of the highest number (drained by
    hand) counts on, since another would be taken away in its place.

    Args:
        share: Of which agents.
        advice: As of now.
        agents: All that the scheduler knows, lost ones too.
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
        # Those being drained are taken back first.
        missing = max(0, missing - sum(not each.drained for each in advice.retiring))
        # Those that are restarting, or drained below others, come back in their places.
        holes = top - len(needed)
        return top + max(0, math.ceil(missing * share.growth - 1e-9) - holes)
    if advice.drains_agents:
        return top  # whoever is too many is drained first, and does not count then
    return max(0, top - math.floor(-missing * share.growth + 1e-9))
