"""Agents that are alike: one device class at one virtual-GPU level.

How a device is divided was decided when its agents were started; the planner only chooses what
each runs. An agent is therefore *one GPU* to it, undivided, of a class of its own per level: pools
may take any number of agents, also some of a device whose other agents serve something else, which
is how the profile of a level was measured (all virtual GPUs busy).
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
    """The agents of one device class and level, by name."""

    device_class: str
    level: int
    agents: tuple[Agent, ...]

    @property
    def name(self) -> str:
        """How plans and explanations call it: "l4", or "l4 1/2" for halves."""
        return self.device_class if self.level == 1 else f"{self.device_class} 1/{self.level}"

    def as_class(self, agents_of_server: Counter[str]) -> GpuClass:
        """Returns what the planner is told; the weakest agent speaks for all.

        Args:
            agents_of_server: All agents of the cluster by server: they share its links, whatever
                their class.
        """
        memory = [agent.memory_bytes for agent in self.agents]
        return GpuClass(
            name=self.name,
            count=len(self.agents),
            gpus_per_server=max(agents_of_server[agent.server] for agent in self.agents),
            server_bits_per_second=float(
                BITS_PER_BYTE * min(agent.link_bytes_per_second for agent in self.agents)
            ),
            memory_bytes=min(memory) if all(memory) else None,
        )


def device_groups(agents: Iterable[Agent]) -> tuple[DeviceGroup, ...]:
    """Returns the groups of a cluster, by class and level."""
    members: dict[tuple[str, int], list[Agent]] = {}
    for agent in sorted(agents, key=lambda each: each.agent_id):
        members.setdefault((agent.device_class, agent.virtual_level), []).append(agent)
    return tuple(
        DeviceGroup(device_class, level, tuple(members[device_class, level]))
        for device_class, level in sorted(members)
    )
