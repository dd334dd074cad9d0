"""Groups of agents that are alike: one device class at one virtual-GPU level.

The division of a device is decided when its agents are started; the planner only chooses what each
of them runs. To the planner an agent is therefore *one undivided GPU*, and each level is a class of
its own. Pools may take any number of agents, even some of a device whose other agents serve
something else. The profile of a level was measured under that condition (all virtual GPUs busy).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from catenary_scheduler.planning.pooled.problem import GpuClass
from catenary_services.domain.plan import Agent

BITS_PER_BYTE = 8


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Agents of one device class and level, in the order of their names."""

    device_class: str
    level: int
    agents: tuple[Agent, ...]

    @property
    def name(self) -> str:
        """Name of the group in plans and explanations: "l4", or "l4 1/2" for halves."""
        return self.device_class if self.level == 1 else f"{self.device_class} 1/{self.level}"

    @property
    def slowest_link(self) -> int:
        """Bytes per second of the slowest network card of its agents."""
        return min(agent.link_bytes_per_second for agent in self.agents)

    def as_class(self, agents_of_server: Counter[str]) -> GpuClass:
        """Returns the group as a GPU class of the planner, with the figures of its weakest agent.

        Args:
            agents_of_server: Number of agents on each server, of whatever class, since they share
                its links.
        """
        memory = [agent.memory_bytes for agent in self.agents]
        return GpuClass(
            name=self.name,
            count=len(self.agents),
            gpus_per_server=max(agents_of_server[agent.server] for agent in self.agents),
            server_bits_per_second=float(BITS_PER_BYTE * self.slowest_link),
            memory_bytes=min(memory) if all(memory) else None,
        )


def device_groups(agents: Iterable[Agent]) -> tuple[DeviceGroup, ...]:
    """Returns the groups of a cluster, ordered by class and level."""
    members: dict[tuple[str, int], list[Agent]] = {}
    for agent in sorted(agents, key=lambda each: each.agent_id):
        members.setdefault((agent.device_class, agent.virtual_level), []).append(agent)
    return tuple(
        DeviceGroup(device_class, level, tuple(members[device_class, level]))
        for device_class, level in sorted(members)
    )
