"""Chains of the active plan as a policy sees them: how many sessions each has and may have."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from scheduler.book.caches import Cache, Claims
from scheduler.book.slots import SlotLedger
from scheduler.dispatch.chained.tracking import Ticket
from services.domain.ids import Nanoseconds
from services.domain.plan import ChainHop, ChainRole, Plan


class Route:
    """A way through all blocks of a model: a chain of the plan, or one made for a request.

    Attributes:
        chain_id: Its name in the plan.
        hops: Agents and blocks, in order.
        claims: The slots a session takes on it.
        capacity: Sessions at a time, c_k.
        service_ns: Expected time of one session, T_k = 1 / mu_k.
        index: Its place in the plan; settles ties.
        running: Sessions that hold slots on it.
        waiting: Requests bound to it that have not started; empty under a central queue.
        role: What it is planned for.
        halves: Of a pair (split phase): where prompts are run, and where the rest is generated.
            Sessions of a pair count there, not on it.
    """

    __slots__ = (
        "capacity", "chain_id", "claims", "halves", "hops", "index", "listed", "rank", "role",
        "running", "service_ns", "waiting",
    )  # fmt: skip

    def __init__(
        self, chain_id: str, hops: tuple[ChainHop, ...], claims: Claims, capacity: int,
        service_ns: Nanoseconds, index: int = 0,
    ) -> None:  # fmt: skip
        self.chain_id = chain_id
        self.hops = hops
        self.claims = claims
        self.capacity = capacity
        self.service_ns = service_ns
        self.index = index
        self.running = 0
        self.waiting: deque[Ticket] = deque()
        self.rank = -1
        """Its place in the order of who chooses; -1 if it must not be chosen."""
        self.listed = False
        """True while who chooses has it in mind."""
        self.role: ChainRole = "mixed"
        self.halves: tuple[Route, Route] | None = None

    @property
    def jobs(self) -> int:
        """Sessions on it and requests bound to it, Z_k."""
        return self.running + len(self.waiting)


def paired(prefill: Route, decode: Route) -> Route:
    """Returns a route that runs prompts on one chain and generates on another.

    The two have no agent in common, so their claims name no cache twice.
    """
    claims = Claims(
        prefill.claims.caches + decode.claims.caches, prefill.claims.slots + decode.claims.slots
    )
    pair = Route(
        f"{prefill.chain_id}+{decode.chain_id}", prefill.hops + decode.hops, claims,
        min(prefill.capacity, decode.capacity), prefill.service_ns + decode.service_ns,
        decode.index,
    )  # fmt: skip
    pair.halves = (prefill, decode)
    return pair


def claims_of(hops: Sequence[ChainHop], slots: SlotLedger) -> Claims:
    """Returns what a session takes on these hops."""
    asked: dict[Cache, int] = {}
    for hop in hops:
        cache = slots.cache(hop.agent, hop.partition)
        asked[cache] = asked.get(cache, 0) + hop.blocks
    return Claims(tuple(asked), tuple(asked.values()))


def set_capacities(plan: Plan, slots: SlotLedger) -> None:
    """Makes the caches of a plan as large as it says, and all others full.

    An agent without an entry keeps what the chains through it ask for.
    """
    wanted: dict[Cache, int] = {}
    for model in plan.models:
        asked: dict[Cache, int] = {}
        for chain in model.chains:
            for hop in chain.hops:
                cache = slots.cache(hop.agent, hop.partition)
                asked[cache] = asked.get(cache, 0) + hop.blocks * chain.capacity
        stated = {
            slots.cache(each.agent, each.partition): each.block_slots for each in model.caches
        }
        wanted.update({**asked, **stated})
    for cache in slots.caches():
        cache.capacity = wanted.get(cache, 0)
    slots.forget_unused()
