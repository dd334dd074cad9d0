"""The policies by name."""

from __future__ import annotations

from scheduler.book.slots import SlotLedger
from scheduler.dispatch.chained.balancing import (
    JoinIdleQueue,
    JoinShortestQueue,
    SmallestExpectedDelay,
    SpeedAwareJoinShortestQueue,
)
from scheduler.dispatch.chained.jffc import JoinFastestFreeChain
from scheduler.dispatch.chained.policy import Policy, PolicyFactory, RandomBelow
from services.errors import InvalidInput

POLICIES = ("jffc", "sa-jsq", "sed", "jsq", "jiq")
"""All of them; the first is the default."""


def policy_factory(
    name: str, slots: SlotLedger, random_below: RandomBelow | None = None
) -> PolicyFactory:
    """Returns what makes a policy for each model.

    Args:
        name: One of `POLICIES`.
        slots: The book JFFC looks into.
        random_below: Settles ties; only JSQ and JIQ need it.

    Raises:
        InvalidInput: If there is no such policy, or it needs `random_below`.
    """
    if name not in POLICIES:
        raise InvalidInput("policy", f"must be one of {', '.join(POLICIES)}")
    if name in ("jsq", "jiq") and random_below is None:
        raise InvalidInput("policy", f"{name} settles ties at random and needs a generator")

    def make() -> Policy:
        if name == "sa-jsq":
            return SpeedAwareJoinShortestQueue()
        if name == "sed":
            return SmallestExpectedDelay()
        if random_below is not None and name == "jsq":
            return JoinShortestQueue(random_below)
        if random_below is not None and name == "jiq":
            return JoinIdleQueue(random_below)
        return JoinFastestFreeChain(slots)

    return make
