"""Caches: the counted resources of the book, and what a session takes of them."""

from __future__ import annotations

import re

from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ResourceId

_RESOURCE = re.compile(r"cache/([^/]+)/(.+):([^:]+)\[(\d+),(\d+)\)")


class Cache:
    """Block slots of one partition on one agent.

    `used` exceeds `capacity` where a plan took slots away from sessions that go on, or where agents
    hold more than was known; nothing is reserved there until it no longer does.

    Beside slots it has tokens, each counted once per block: `tokens` that sessions have cached as
    far as is known, `unseen` that the agent reports beyond these, and `token_capacity`; 0: slots
    are the only limit.
    """

    __slots__ = (
        "agent",
        "capacity",
        "partition",
        "resource",
        "token_capacity",
        "tokens",
        "unseen",
        "used",
    )

    def __init__(self, agent: AgentId, partition: PartitionKey) -> None:
        self.agent = agent
        self.partition = partition
        self.resource = cache_of(agent, partition)
        self.capacity = 0
        self.used = 0
        self.token_capacity = 0
        self.tokens = 0
        self.unseen = 0

    def has_tokens(self, more: int) -> bool:
        """True if so many tokens more fit, each counted once per block."""
        if not self.token_capacity or not self.tokens:
            return True  # of one that is empty, whatever was reported is out of date
        return self.tokens + self.unseen + more <= self.token_capacity


class SlotClaims:
    """The slots a session takes in each cache along a chain; no cache is named twice."""

    __slots__ = ("caches", "slots")

    def __init__(self, caches: tuple[Cache, ...], slots: tuple[int, ...]) -> None:
        self.caches = caches
        self.slots = slots


def cache_of(agent: AgentId, partition: PartitionKey) -> ResourceId:
    """Returns the resource that is an agent's cache for a partition."""
    return ResourceId(f"cache/{agent}/{partition}")


def place_of(resource: ResourceId) -> tuple[AgentId, PartitionKey] | None:
    """Returns agent and partition of a cache; None for what is no cache."""
    found = _RESOURCE.fullmatch(resource)
    if found is None:
        return None
    agent, name, version, first, last = found.groups()
    return AgentId(agent), PartitionKey(ModelKey(name, version), int(first), int(last))
