"""Number of agents that some workers take, and the choice of those that may go.

A worker is a chain of agents. Models whose chains share agents need these agents once. The agents
of models that share none add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil

from catenary_services.domain.ids import AgentId, ModelKey

Workers = Sequence[Set[AgentId]]
"""Agents of each chain of a model."""


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """The workers of a model, and how many of them there should be."""

    workers: Workers
    wanted: int

    @property
    def agents(self) -> frozenset[AgentId]:
        """All agents that are on one of the model's chains."""
        return frozenset(agent for worker in self.workers for agent in worker)

    @property
    def agents_wanted(self) -> int:
        """Number of agents that `wanted` chains take, at the mean of the present chains."""
        if not self.workers:
            return 0
        return ceil(self.wanted * len(self.agents) / len(self.workers) - 1e-9)


def agents_wanted(workers_of_models: Iterable[ModelWorkers], others: int) -> int:
    """Returns how many agents a cluster should have.

    Args:
        workers_of_models: The workers of every model that generates text.
        others: Number of agents that are needed for something else.
    """
    groups: list[tuple[frozenset[AgentId], int]] = []
    for model_workers in workers_of_models:
        agents, most = model_workers.agents, model_workers.agents_wanted
        apart = []
        for group, wanted in groups:
            if group & agents:
                agents, most = agents | group, max(most, wanted)
            else:
                apart.append((group, wanted))
        groups = [*apart, (agents, most)]
    return others + sum(most for _, most in groups)


def next_to_go(
    workers_of_models: Mapping[ModelKey, ModelWorkers],
    tokens: Mapping[AgentId, int],
    agents: Iterable[AgentId],
) -> AgentId | None:
    """Returns the agent that should go next; None if every one is needed.

    Every model must keep enough workers without it. Of those that may go, the one with the fewest
    cached tokens goes, which would have to move.

    Agents that packing has emptied therefore go first.

    Args:
        workers_of_models: The workers of every model that generates text.
        tokens: Tokens cached on each agent; an agent that is missing has none.
        agents: The agents that may go. Of equal ones the last by name goes, because it came last.
    """
    able = [
        agent
        for agent in agents
        if all(
            sum(agent not in worker for worker in model_workers.workers)
            >= min(model_workers.wanted, len(model_workers.workers))
            for model_workers in workers_of_models.values()
        )
    ]
    return max(able, key=lambda agent: (-tokens.get(agent, 0), _order(agent)), default=None)


def last_of_each(agents: Iterable[AgentId]) -> frozenset[AgentId]:
    """Returns the agents of the highest number among those whose names are otherwise equal.

    Kubernetes removes the pods of a StatefulSet from the highest number down, whichever was
    drained.
    """
    last: dict[str, AgentId] = {}
    for agent in agents:
        stem, _, _ = agent.rpartition("-")
        if stem not in last or _order(agent) > _order(last[stem]):
            last[stem] = agent
    return frozenset(last.values())


def _order(agent: AgentId) -> tuple[int, str]:
    """Returns a key that sorts agent-10 behind agent-9."""
    return len(agent), agent
