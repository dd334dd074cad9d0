"""Which agents a number of workers takes, and which of them may go.

A worker is a chain of agents. Models whose chains run on the same agents need these agents once;
models on agents of their own add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil

from catenary_services.domain.ids import AgentId, ModelKey

Workers = Sequence[Set[AgentId]]
"""The agents of each chain of a model."""


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of a model, and how many there should be."""

    workers: Workers
    wanted: int

    @property
    def agents(self) -> frozenset[AgentId]:
        """All that are on one of its chains."""
        return frozenset(agent for worker in self.workers for agent in worker)

    @property
    def agents_wanted(self) -> int:
        """How many agents so many chains take, by what the present ones take."""
        if not self.workers:
            return 0
        return ceil(self.wanted * len(self.agents) / len(self.workers) - 1e-9)


def agents_wanted(crews: Iterable[Crew], others: int) -> int:
    """Returns how many agents there should be.

    Args:
        crews: Of the models that generate text.
        others: Agents that are needed for something else.
    """
    groups: list[tuple[frozenset[AgentId], int]] = []
    for crew in crews:
        agents, most = crew.agents, crew.agents_wanted
        apart = []
        for group, wanted in groups:
            if group & agents:
                agents, most = agents | group, max(most, wanted)
            else:
                apart.append((group, wanted))
        groups = [*apart, (agents, most)]
    return others + sum(most for _, most in groups)


def next_to_go(
    crews: Mapping[ModelKey, Crew], tokens: Mapping[AgentId, int], agents: Iterable[AgentId]
) -> AgentId | None:
    """Returns the agent with the least to move without which every model keeps enough workers.

    Agents that packing has emptied go first, since they have nothing.

    Args:
        crews: Of the models that generate text.
        tokens: Cached on each agent, which would have to move; an agent not in it has none.
        agents: Those that may go. Of equals the last by name goes: it came last.
    """
    able = [
        agent
        for agent in agents
        if all(
            sum(agent not in worker for worker in crew.workers)
            >= min(crew.wanted, len(crew.workers))
            for crew in crews.values()
        )
    ]
    return max(able, key=lambda agent: (-tokens.get(agent, 0), _order(agent)), default=None)


def last_of_each(agents: Iterable[AgentId]) -> frozenset[AgentId]:
    """Returns the agents of the highest number among those with equal names otherwise.

    Kubernetes takes the pods of a StatefulSet away in this order, whoever was drained.
    """
    last: dict[str, AgentId] = {}
    for agent in agents:
        stem, _, _ = agent.rpartition("-")
        if stem not in last or _order(agent) > _order(last[stem]):
            last[stem] = agent
    return frozenset(last.values())


def _order(agent: AgentId) -> tuple[int, str]:
    """Sorts agent-10 behind agent-9."""
    return len(agent), agent
