"""Chains and sessions as packing sees them: bins and items, with one size for all resources.

A session takes memory, one of so many slots, and a share of the time that a step may take. Mell
packs one size, so a session counts as the largest share it takes of any of these, in blocks of the
chain's memory (whole ones, so that borders of size classes are exact). Then what fits by size fits
by all three.
"""

from __future__ import annotations

import math

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.placing.occupancy import RunningSequence
from catenary_services.domain.decoder import CACHE_BLOCK_TOKENS
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import Chain

_SLOT_BLOCKS = 1024
"""Blocks that a slot counts on a chain whose memory is not limited."""


class PackedChain:
    """A chain that sessions can be packed onto.

    Attributes:
        route: The chain.
        capacity: Blocks that it holds.
        least: The least blocks that a session counts, since it takes a slot.
        number: Its number among all chains of its model.
        pool: Index of its pool.
        place: Its index in the pool.
        held: Blocks of all sessions on it and moving to or from it.
        sessions: Number of these sessions.
        tokens: Tokens that they have cached.
    """

    __slots__ = (
        "capacity",
        "held",
        "least",
        "number",
        "place",
        "pool",
        "route",
        "sessions",
        "tokens",
    )

    def __init__(self, route: ChainState, capacity: int) -> None:
        self.route = route
        self.capacity = capacity
        self.least = max(1, capacity // max(1, route.capacity))
        self.number = 0
        self.pool = 0
        self.place = 0
        self.held = 0
        self.sessions = 0
        self.tokens = 0

    @property
    def overflows(self) -> bool:
        """True if it will hold more than it can: every session that can leave it has to."""
        return self.held > self.capacity

    def holds(self, tokens: int, size: int) -> None:
        """Counts a session that is here, or is moving to or from here."""
        self.held += size
        self.sessions += 1
        self.tokens += tokens

    def share_of_step(
        self, running: RunningSequence, lines: LatencyLines, gamma: float, theta: float
    ) -> float:
        """Returns the share that a session takes of the steps its objective allows.

        Constraint b (Aladdin, eq. 4) is linear in the sessions of a batch: k2 times the context
        plus c2 of each, added up, must not exceed theta times the objective less c3.
        """
        if not running.per_token_ns:
            return 0.0
        spare = theta * (running.per_token_ns - lines.decode_ns)
        if spare <= 0.0:
            return 1.0
        context = running.prompt_tokens + gamma * running.final_tokens
        taken = lines.decode_context_token_ns * context + theta * lines.decode_session_ns
        return min(1.0, taken / spare)


class SessionSnapshot:
    """A session in one epoch.

    Attributes:
        sequence: Its request, which names it across moves.
        session: The session that generates.
        chain: Its chain, or the target of its move.
        tokens: Cached tokens, as reported.
        growth: Tokens it is expected to get in an epoch.
        size: Blocks it will count at the end of the coming epoch.
        rests: True if it moves, or moved lately.
    """

    __slots__ = ("chain", "growth", "rests", "sequence", "session", "size", "tokens")

    def __init__(
        self,
        sequence: SequenceRequest,
        session: Session,
        chain: PackedChain,
        growth: int,
        size: int,
        rests: bool,
    ) -> None:
        self.sequence = sequence
        self.session = session
        self.chain = chain
        self.tokens = sequence.tokens
        self.growth = growth
        self.size = size
        self.rests = rests


def in_blocks(tokens: int) -> int:
    """Returns the number of blocks that `tokens` take, rounded up."""
    return -(-tokens // CACHE_BLOCK_TOKENS)


def blocks_of(chain: Chain, session_tokens: int) -> int:
    """Returns the size of a chain in blocks.

    Where memory holds every slot at full length, slots are the limit, and all sessions count the
    same; likewise where the memory is not known.
    """
    tokens, most = chain.cache_tokens, chain.capacity * session_tokens
    if 0.0 < tokens < math.inf and (not session_tokens or tokens < most):
        return max(1, int(tokens) // CACHE_BLOCK_TOKENS)
    return chain.capacity * (in_blocks(session_tokens) if session_tokens else _SLOT_BLOCKS)


def size_of(chain: PackedChain, tokens: int, share: float) -> int:
    """Returns the blocks that a session counts on a chain.

    Args:
        chain: The chain.
        tokens: Tokens that the session will have cached.
        share: Its share of the time of steps.
    """
    size = max(chain.least, in_blocks(tokens), math.ceil(share * chain.capacity))
    return min(size, chain.capacity)
