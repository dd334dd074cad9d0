"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.placement.board import Board
from catenary_scheduler.dispatch.chained.policies.balancing import (
    JoinIdleQueue,
    JoinShortestQueue,
    SmallestExpectedDelay,
    SpeedAwareJoinShortestQueue,
)
from catenary_scheduler.dispatch.chained.policies.balancing_sessions import (
    FewestSessions,
    LeastContext,
    PowerOfTwoChoices,
)
from catenary_scheduler.dispatch.chained.policies.jffc import JoinFastestFreeChain
from catenary_scheduler.dispatch.chained.policies.pairing import Pairing
from catenary_scheduler.dispatch.chained.policies.policy import Policy, PolicyFactory, RandomBelow
from catenary_services.errors import InvalidInput

POLICIES = (
    "jffc",
    "slo",
    "sa-jsq",
    "sed",
    "jsq",
    "jiq",
    "fewest-sessions",
    "power-of-two",
    "least-loaded",
)
"""All of them; the first is the default."""
_DRAWING: dict[str, Callable[[RandomBelow], Policy]] = {
    "jsq": JoinShortestQueue,
    "jiq": JoinIdleQueue,
    "fewest-sessions": FewestSessions,
    "power-of-two": PowerOfTwoChoices,
}
"""Those that settle ties by chance."""


def policy_factory(
    name: str,
    slots: SlotLedger,
    random_below: RandomBelow | None = None,
) -> PolicyFactory:
    """Returns what makes a policy for each model.

    Args:
        name: One of `POLICIES`.
        slots: The book JFFC looks into.
        random_below: Settles ties; only those that draw need it.

    Raises:
        InvalidInput: If there is no such policy, or it needs `random_below`.
    """
    if name not in POLICIES:
        raise InvalidInput("policy", f"must be one of {', '.join(POLICIES)}")
    if name in _DRAWING and random_below is None:
        raise InvalidInput("policy", f"{name} settles ties at random and needs a generator")

    if name == "slo":
        return lambda: Board(slots)
    if name == "least-loaded":
        return lambda: LeastContext(slots)

    def single() -> Policy:
        if name == "sa-jsq":
            return SpeedAwareJoinShortestQueue()
        if name == "sed":
            return SmallestExpectedDelay()
        if random_below is not None and name in _DRAWING:
            return _DRAWING[name](random_below)
        return JoinFastestFreeChain(slots)

    return lambda: Pairing(single(), slots)
