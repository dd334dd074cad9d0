"""Tokens in caches: the known number on each chain and in each agent's partition.

Slots limit the number of sessions, tokens their total size. Both bind only where a plan has more
slots than memory holds at full length (`Chain.cache_tokens`). Tokens are counted in whole cache
blocks, from the prompt when a session starts, then as gateways report them; closing sessions count
until every agent has released them. What agents report beyond that (sessions no gateway has claimed
yet) is kept per partition as `Cache.unseen`.
"""

from __future__ import annotations

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.dispatch.chained.chain_state import ChainState, in_blocks
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, Nanoseconds, SessionId

_WINDOW_NS = 200 * NANOSECONDS_PER_MILLISECOND
"""Time over which the growth of a chain is measured."""


class SessionTokens:
    """The tokens of one session, and the routes on which they count."""

    __slots__ = ("leaving", "rounded", "routes", "tokens")

    def __init__(self, routes: list[ChainState], tokens: int) -> None:
        self.routes = routes
        self.tokens = tokens
        self.rounded = in_blocks(tokens)
        self.leaving = False
        """True if it is closing, so that what it holds will soon be free."""


class KvBudget:
    """Counts the tokens of all sessions.

    Invariants: `tokens` of a route are the sum over its sessions, `leaving` over those of them that
    are closing; `tokens` of a cache are the sum over its sessions, times the blocks each has there.
    """

    def __init__(self) -> None:
        self._held: dict[SessionId, SessionTokens] = {}

    def begins(self, session: SessionId, routes: list[ChainState], tokens: int) -> None:
        """Counts a new session that has slots on these routes and will cache `tokens` on each."""
        self.ends(session)
        held = self._held[session] = SessionTokens(routes, tokens)
        for route in routes:
            _count(route, held.rounded)

    def tokens_of(self, session: SessionId) -> int:
        """Returns the tokens that a session counts for, in whole cache blocks."""
        held = self._held.get(session)
        return held.rounded if held is not None else 0

    def grows(self, session: SessionId, tokens: int) -> None:
        """Sets the number of tokens that a session has cached."""
        held = self._held.get(session)
        if held is None or tokens <= held.tokens:
            return
        for route in held.routes:
            route.grown_tokens += tokens - held.tokens
        held.tokens = tokens
        more = in_blocks(tokens) - held.rounded
        if more:
            held.rounded += more
            for route in held.routes:
                _count(route, more)
                if held.leaving:
                    route.leaving_tokens += more

    def leaves(self, session: SessionId) -> None:
        """Counts a session as closing."""
        held = self._held.get(session)
        if held is not None and not held.leaving:
            held.leaving = True
            for route in held.routes:
                route.leaving_tokens += held.rounded

    def left(self, session: SessionId, route: ChainState) -> None:
        """Stops counting a session on one route."""
        held = self._held.get(session)
        if held is None or route not in held.routes:
            return
        held.routes.remove(route)
        _count(route, -held.rounded)
        if held.leaving:
            route.leaving_tokens -= held.rounded
        if not held.routes:
            del self._held[session]

    def ends(self, session: SessionId) -> None:
        """Stops counting a session."""
        held = self._held.get(session)
        if held is not None:
            for route in list(held.routes):
                self.left(session, route)

    def sessions(self) -> set[SessionId]:
        """Returns the sessions that are counted."""
        return set(self._held)

    def is_leaving(self, session: SessionId) -> bool | None:
        """Returns whether a session counts as closing; None if it is not counted."""
        held = self._held.get(session)
        return held.leaving if held is not None else None

    def sessions_on(self, route: ChainState) -> list[SessionId]:
        """Returns the sessions that are counted on a route and are not closing."""
        return [
            session
            for session, held in self._held.items()
            if not held.leaving and route in held.routes
        ]

    def reported(self, cache: Cache, block_tokens: int) -> bool:
        """Takes in what an agent has cached; True if a request may find more room now."""
        before, cache.unseen = cache.unseen, max(0, block_tokens - cache.tokens)
        return cache.unseen < before

    def is_full(self, cache: Cache) -> None:
        """Marks a cache as full until its agent reports its content, or holds no session."""
        cache.unseen = max(cache.unseen, cache.token_capacity - cache.tokens)


def expected_tokens(route: ChainState, horizon_ns: Nanoseconds, least: int) -> int:
    """Returns the tokens that a chain's staying sessions will have cached after a time.

    Args:
        route: The chain.
        horizon_ns: The time from now.
        least: Tokens that every session gets at least until then.
    """
    growth = max(route.tokens_per_ns * horizon_ns, float(least * route.running))
    return route.tokens - route.leaving_tokens + round(growth)


def measure_growth(route: ChainState, now: Nanoseconds) -> None:
    """Updates the rate at which the sessions of a chain grow, all together."""
    elapsed = now - route.grown_since
    if elapsed < _WINDOW_NS:
        return
    if route.grown_since and elapsed < 10 * _WINDOW_NS:
        rate = route.grown_tokens / elapsed
        before = route.tokens_per_ns
        route.tokens_per_ns = (before + rate) / 2 if before else rate
    route.grown_tokens = 0
    route.grown_since = now


def _count(route: ChainState, tokens: int) -> None:
    route.tokens += tokens
    claims = route.claims
    for at, cache in enumerate(claims.caches):
        cache.tokens += tokens * claims.slots[at]
