"""The interface between the dispatcher and the policies that choose chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.events import SessionRequested
from catenary_scheduler.dispatch.placing.prefix_directory import (
    NOTHING,
    CachedTokens,
)


class ChainPolicy(Protocol):
    """Chooses the route of a session; one object per model. The dispatcher keeps count.

    A policy may return routes it made itself, over any caches that are free, instead of the chains
    of the plan: a route is hops and the slots they take.
    """

    @property
    def central(self) -> bool:
        """True if requests that find no free route wait in one queue for all routes.

        Otherwise a request is bound to a route when it arrives, free or not, and waits there, first
        come, first served.
        """
        ...

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Takes the routes to be used from now on, in order of the plan.

        All their agents are there.
        """
        ...

    def choose(
        self,
        request: SessionRequested,
        tokens: int = 0,
        cached: CachedTokens = NOTHING,
    ) -> ChainState | None:
        """Returns the route for a request; None if there is none (if central: none free).

        Args:
            request: The request.
            tokens: Tokens that its session will have cached when its prompt has run.
            cached: How many of these chains should have already, by their hops.
        """
        ...

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this route."""
        ...

    def freed(self, cache: Cache) -> None:
        """Notes that slots of this cache were freed."""
        ...
