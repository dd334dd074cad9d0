"""Rivals of the policies that choose a chain for a session, by their names in scenarios.

balancing            JSQ, SA-JSQ, JIQ and SED: a queue at every chain
balancing_sessions   by number of sessions or by context, as clusters of engines are balanced
bound_queues         queues at the chains, for all of these but least context
draws                random numbers for policies that break ties at random
"""

from __future__ import annotations

from collections.abc import Callable

from catenary_lab.policies.balancing import (
    JoinIdleQueue,
    JoinShortestQueue,
    SmallestExpectedDelay,
    SpeedAwareJoinShortestQueue,
)
from catenary_lab.policies.balancing_sessions import (
    FewestSessions,
    LeastContext,
    PowerOfTwoChoices,
    RandomBelow,
)
from catenary_lab.policies.bound_queues import PerChainQueues
from catenary_lab.policies.draws import Draws
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained import POLICIES as OWN
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.chained.policies.pairing import PairPolicy
from catenary_scheduler.dispatch.chained.policies.policy import ChainPolicy
from catenary_scheduler.dispatch.chained.queues.policies import policy_factory
from catenary_scheduler.dispatch.chained.queues.wait_queue import PolicyFactory, WaitQueue
from catenary_services.errors import InvalidInput

_BOUND: dict[str, Callable[[RandomBelow], ChainPolicy]] = {
    "sa-jsq": SpeedAwareJoinShortestQueue,
    "sed": SmallestExpectedDelay,
    "jsq": JoinShortestQueue,
    "jiq": JoinIdleQueue,
    "fewest-sessions": FewestSessions,
    "power-of-two": PowerOfTwoChoices,
}
RIVALS = (*_BOUND, "least-loaded")
POLICIES = (*OWN, *RIVALS)


def policy_named(name: str, random_below: RandomBelow) -> PolicyFactory:
    """Returns the factory of a policy, be it a rival or one of the scheduler's own.

    Args:
        name: One of `POLICIES`.
        random_below: Breaks ties of policies that draw.

    Raises:
        InvalidInput: There is no such policy.
    """
    if name in OWN:
        return policy_factory(name)
    if name == "least-loaded":
        return LeastContext
    make = _BOUND.get(name)
    if make is None:
        raise InvalidInput("policy", f"must be one of {', '.join(POLICIES)}")

    def bound(slots: SlotLedger) -> PerChainQueues:
        return PerChainQueues(PairPolicy(make(random_below), slots), slots)

    return bound


def seeded(name: str, seed: int) -> PolicyFactory:
    """Returns the factory of a policy that breaks ties by a seed; each policy made draws anew.

    Args:
        name: One of `POLICIES`.
        seed: Decides the draws.

    Raises:
        InvalidInput: There is no such policy.
    """
    policy_named(name, Draws(seed).below)

    def fresh(slots: SlotLedger) -> WaitQueue | SloPlacer:
        return policy_named(name, Draws(seed).below)(slots)

    return fresh
