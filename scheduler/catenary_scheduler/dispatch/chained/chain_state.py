"""Chains of the active plan as a policy sees them: the sessions each has and may have."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.book.caches import Cache, SlotClaims
from catenary_scheduler.book.slots import SlotLedger
from catenary_services.domain.decoder import CACHE_BLOCK_TOKENS
from catenary_services.domain.ids import Nanoseconds
from catenary_services.domain.plan import ChainHop, ChainRole, Plan

SPARE_TOKENS = 32
"""Tokens that every session may grow before a chain counts as full for a new one."""


class ChainState:
    """A path through all blocks of a model: a chain of the plan, or one made for a request.

    Attributes:
        chain_id: Its name in the plan.
        hops: Agents and blocks, in order.
        claims: The slots that a session takes on it.
        capacity: Most simultaneous sessions, c_k.
        service_ns: Expected time of one session, T_k = 1 / mu_k.
        prompt_token_ns: The part of it of one token of a prompt; 0 if it is not known.
        index: Its place in the plan; settles ties.
        running: Sessions that hold slots on it.
        bound: Requests bound to it that have not started; 0 under a central queue.
        role: What it is planned for.
        halves: Of a pair (split phase): where prompts are run, and where the rest is generated.
            Sessions of a pair count there, not on it.
        cache_tokens: Tokens its caches hold, of all sessions together; 0: slots are the only limit.
        session_tokens: Tokens that one session may have; 0 if that is not known.
        tokens: That its sessions have cached, in whole blocks, as far as is known.
        leaving_tokens: Of these, what sessions have that are closing.
        tokens_per_ns: How fast its sessions grow, all together.
        grown_tokens: By how much they have since `grown_since`.
        grown_since: When that was begun to be counted.
    """

    __slots__ = (
        "bound",
        "cache_tokens",
        "capacity",
        "chain_id",
        "claims",
        "grown_since",
        "grown_tokens",
        "halves",
        "hops",
        "index",
        "leaving_tokens",
        "listed",
        "prompt_token_ns",
        "rank",
        "role",
        "running",
        "service_ns",
        "session_tokens",
        "tokens",
        "tokens_per_ns",
    )

    def __init__(
        self,
        chain_id: str,
        hops: tuple[ChainHop, ...],
        claims: SlotClaims,
        capacity: int,
        service_ns: Nanoseconds,
        index: int = 0,
    ) -> None:
        self.chain_id = chain_id
        self.hops = hops
        self.claims = claims
        self.capacity = capacity
        self.service_ns = service_ns
        self.prompt_token_ns = 0.0
        self.index = index
        self.running = 0
        self.bound = 0
        self.rank = -1
        """Place in the order of the policy; -1 if the chain must not be chosen."""
        self.listed = False
        """True while the policy has the chain among its candidates."""
        self.role: ChainRole = "mixed"
        self.halves: tuple[ChainState, ChainState] | None = None
        self.cache_tokens = 0
        self.session_tokens = 0
        self.tokens = 0
        self.leaving_tokens = 0
        self.tokens_per_ns = 0.0
        self.grown_tokens = 0
        self.grown_since: Nanoseconds = 0

    def has_room(self, tokens: int, spare: int = SPARE_TOKENS) -> bool:
        """True if its caches hold a session more.

        A chain without sessions always has room: any session fits where it is alone.

        Args:
            tokens: Tokens that the session will have cached.
            spare: Tokens by which each session may grow.
        """
        if self.halves is not None:
            prefill, decode = self.halves
            return prefill.has_room(tokens, spare) and decode.has_room(tokens, spare)
        if self.cache_tokens and self.running:
            needed = self.tokens + in_blocks(tokens) + spare * (self.running + 1)
            if needed > self.cache_tokens:
                return False
        for cache in self.claims.caches:
            if cache.token_capacity:  # mostly none has one, and nothing else is to be looked at
                return self._caches_have(in_blocks(tokens))
        return True

    def _caches_have(self, tokens: int) -> bool:
        """True if each cache has room for so many tokens in each of its blocks."""
        for at, cache in enumerate(self.claims.caches):
            if not cache.has_tokens(tokens * self.claims.slots[at]):
                return False
        return True

    @property
    def room_tokens(self) -> int:
        """Tokens that its caches hold, of all sessions together; 0 if that is not known."""
        return self.cache_tokens or self.session_tokens * self.capacity

    @property
    def jobs(self) -> int:
        """Sessions on it and requests bound to it, Z_k."""
        return self.running + self.bound


def in_blocks(tokens: int) -> int:
    """Returns tokens rounded up to whole cache blocks."""
    return -(-tokens // CACHE_BLOCK_TOKENS) * CACHE_BLOCK_TOKENS


def paired(prefill: ChainState, decode: ChainState) -> ChainState:
    """Returns a route that runs prompts on one chain and generates on another.

    The two have no agent in common, so their claims name no cache twice.
    """
    claims = SlotClaims(
        prefill.claims.caches + decode.claims.caches, prefill.claims.slots + decode.claims.slots
    )
    pair = ChainState(
        f"{prefill.chain_id}+{decode.chain_id}",
        prefill.hops + decode.hops,
        claims,
        min(prefill.capacity, decode.capacity),
        prefill.service_ns + decode.service_ns,
        decode.index,
    )
    pair.halves = (prefill, decode)
    return pair


def claims_of(hops: Sequence[ChainHop], slots: SlotLedger) -> SlotClaims:
    """Returns the slots that a session takes on these hops."""
    asked: dict[Cache, int] = {}
    for hop in hops:
        cache = slots.cache(hop.agent, hop.partition)
        asked[cache] = asked.get(cache, 0) + hop.blocks
    return SlotClaims(tuple(asked), tuple(asked.values()))


def set_capacities(plan: Plan, slots: SlotLedger) -> None:
    """Gives the caches of a plan their planned size in slots and tokens; all others become full.

    An agent without an entry keeps what the chains through it ask for.
    """
    wanted: dict[Cache, int] = {}
    tokens: dict[Cache, int] = {}
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
        for each in model.caches:
            tokens[slots.cache(each.agent, each.partition)] = each.cache_tokens
    for cache in slots.caches():
        cache.capacity = wanted.get(cache, 0)
        cache.token_capacity = tokens.get(cache, 0)
    slots.forget_unused()
