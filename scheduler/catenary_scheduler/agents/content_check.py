"""Finds agents that have other weights than the rest: unlike contents of a model are never mixed.

The cluster serves one content of every model: that of the leader's own repository, or where that
has none, the one that most agents have (of equally many, the one reported first). An agent that
reports another one is told to unload it, is named in an event, and hosts nothing of the model until
it has loaded the right one.
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
"""Records an event, given its kind and facts."""


class ContentCheck:
    """Compares the contents that agents have loaded with the content that is served."""

    def __init__(
        self, deployed: Mapping[ModelKey, Deployment], registry: AgentRegistry, note: Note
    ) -> None:
        self._deployed = deployed
        self._registry = registry
        self._note = note
        self._told: dict[AgentId, dict[PartitionKey, str]] = {}
        self._said: dict[ModelKey, dict[AgentId, str]] = {}
        """Digest that each connected agent reported for a model, whether or not the agent may serve
        it."""

    def expected(self, model: ModelKey) -> str:
        """Returns the digest of the content that is served of a model; empty if it is unknown."""
        deployment = self._deployed.get(model)
        if deployment is not None and deployment.content:
            return deployment.content
        votes = Counter(self._said.get(model, {}).values())
        return max(votes, key=lambda digest: votes[digest], default="")

    def refused(self, agent: AgentId, key: PartitionKey, problem: str, content: str) -> None:
        """Handles an agent's refusal to load: its files or results are not what they should be."""
        self.says(agent, key.model, content)
        self.differs(agent, key, f"agent {agent}: {problem}")

    def says(self, agent: AgentId, model: ModelKey, content: str) -> None:
        """Notes the digest of what an agent has of a model; an empty one is ignored."""
        if content:
            self._said.setdefault(model, {})[agent] = content

    def unlike(self) -> list[tuple[AgentId, PartitionKey, str]]:
        """Returns loaded partitions with another content than is served, each with a message."""
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
        """Reports, once per message, that an agent has or would have loaded another content."""
        mine = self._told.setdefault(agent, {})
        if mine.get(key) == text:
            return
        mine[key] = text
        _log.error("content_differs", agent=agent, partition=str(key), problem=text)
        self._note("content_differs", {"agent": agent, "partition": str(key), "problem": text})

    def loaded(self, agent: AgentId, key: PartitionKey) -> None:
        """Notes a partition that an agent loaded; `unlike` tells whether its content is right."""
        self._told.get(agent, {}).pop(key, None)

    def gone(self, agent: AgentId) -> None:
        """Forgets an agent that is gone; it may come back with another copy."""
        self._told.pop(agent, None)
        for said in self._said.values():
            said.pop(agent, None)
