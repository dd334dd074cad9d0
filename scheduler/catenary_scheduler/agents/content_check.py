"""Who has other weights than the rest: agents of unlike content are never mixed.

Of every model the cluster serves one content. It is what the leader's own repository says; where
that says nothing, it is what most agents have (of equally many, those that said so first). An agent
that says it has loaded another is told to give that up, is named, and hosts nothing of the model
until it has loaded the right one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from catenary_scheduler.agents.deployments import Deployment
from catenary_scheduler.agents.registry import AgentRegistry
from catenary_services.content.record import SHOWN_DIGITS
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from catenary_services.log import get_logger

_log = get_logger(__name__)

Note = Callable[[str, dict[str, str]], None]
"""Enters an event, by kind and facts."""


class ContentCheck:
    """What agents have loaded, compared."""

    def __init__(
        self, deployed: Mapping[ModelKey, Deployment], registry: AgentRegistry, note: Note
    ) -> None:
        self._deployed = deployed
        self._registry = registry
        self._note = note
        self._told: dict[AgentId, dict[PartitionKey, str]] = {}
        self._said: dict[ModelKey, dict[AgentId, str]] = {}
        """What agents that are there have, whether they may serve it or not."""

    def expected(self, model: ModelKey) -> str:
        """Returns the digest of what is served of a model; empty if nobody knows."""
        deployment = self._deployed.get(model)
        if deployment is not None and deployment.content:
            return deployment.content
        votes = Counter(self._said.get(model, {}).values())
        return max(votes, key=lambda digest: votes[digest], default="")

    def refused(self, agent: AgentId, key: PartitionKey, problem: str, content: str) -> None:
        """An agent did not load something: what it has, or computes, is not what it should be."""
        self.says(agent, key.model, content)
        self.differs(agent, key, f"agent {agent}: {problem}")

    def says(self, agent: AgentId, model: ModelKey, content: str) -> None:
        """An agent says what it has of a model."""
        if content:
            self._said.setdefault(model, {})[agent] = content

    def unlike(self) -> list[tuple[AgentId, PartitionKey, str]]:
        """Returns what agents have loaded that is not what is served, and what to say of it."""
        for agent, record in self._registry.items():
            for key, loaded in record.loaded.items():
                self.says(agent, key.model, loaded.content)
        known: dict[ModelKey, str] = {}
        found = []
        for agent, record in self._registry.items():
            for key, loaded in record.loaded.items():
                if not loaded.content:
                    continue
                if key.model not in known:
                    known[key.model] = self.expected(key.model)
                expected = known[key.model]
                if loaded.content != expected:
                    text = (
                        f"agent {agent} has other weights of {key.model}: sha256"
                        f" {loaded.content[:SHOWN_DIGITS]} instead of {expected[:SHOWN_DIGITS]}"
                    )
                    found.append((agent, key, text))
        return found

    def differs(self, agent: AgentId, key: PartitionKey, text: str) -> None:
        """An agent has, or would have loaded, something else than is served."""
        mine = self._told.setdefault(agent, {})
        if mine.get(key) == text:
            return
        mine[key] = text
        _log.error("content_differs", agent=agent, partition=str(key), problem=text)
        self._note("content_differs", {"agent": agent, "partition": str(key), "problem": text})

    def loaded(self, agent: AgentId, key: PartitionKey) -> None:
        """An agent has loaded a partition; whether it is the right one, `unlike` says."""
        self._told.get(agent, {}).pop(key, None)

    def gone(self, agent: AgentId) -> None:
        """An agent is gone; it may come back with another copy."""
        self._told.pop(agent, None)
        for said in self._said.values():
            said.pop(agent, None)
