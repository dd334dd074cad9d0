"""Caches, the counted resources of the book, and the slots that a session takes in them."""

from __future__ import annotations

import re

from catenary_scheduler.book.steps import CacheSteps
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ResourceId

_RESOURCE = re.compile(r"cache/([^/]+)/(.+):([^:]+)\[(\d+),(\d+)\)")


class Cache:
    """Key-value cache of one partition on one agent, counted in block slots.

    `used` exceeds `capacity` if a new plan has fewer slots than running sessions hold, or if an
    agent holds more than was known. No slot is reserved there until `used` is below `capacity`
    again.

    Tokens are counted once per block: `tokens` are those that sessions are known to have cached,
    `unseen` those that the agent reports beyond them, and `token_capacity` is their limit. A
    `token_capacity` of 0 means that slots are the only limit.

    `steps` reserve the time of the sessions on a device that computes batches too; None for any
    other device.
    """

    __slots__ = (
        "agent",
        "capacity",
        "partition",
        "resource",
        "steps",
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
        self.steps: CacheSteps | None = None

    def use(self, slots: int) -> None:
        """Counts slots that a session takes, or frees if they are less than 0."""
        self.used += slots
        if self.steps is not None:
            self.steps.count(self.used, self.tokens)

    def has_tokens(self, more: int) -> bool:
        """Returns True if `more` tokens fit, each counted once per block."""
        if not self.token_capacity or not self.tokens:
            return True  # what an agent reported of a cache that is now empty is out of date
        return self.tokens + self.unseen + more <= self.token_capacity


class SlotClaims:
    """The slots a session takes in each cache along a chain; no cache is named twice.

    Attributes:
        caches: The caches, in order of the chain.
        slots: The slots in each of them.
        blocks: The slots in all of them together, one for each block of the chain.
    """

    __slots__ = ("blocks", "caches", "slots")

    def __init__(self, caches: tuple[Cache, ...], slots: tuple[int, ...]) -> None:
        self.caches = caches
        self.slots = slots
        self.blocks = sum(slots)


def cache_of(agent: AgentId, partition: PartitionKey) -> ResourceId:
    return ResourceId(f"cache/{agent}/{partition}")


def place_of(resource: ResourceId) -> tuple[AgentId, PartitionKey] | None:
    """Returns the agent and the partition of a cache; None for a resource that is not a cache."""
    found = _RESOURCE.fullmatch(resource)
    if found is None:
        return None
    agent, name, version, first, last = found.groups()
    return AgentId(agent), PartitionKey(ModelKey(name, version), int(first), int(last))
