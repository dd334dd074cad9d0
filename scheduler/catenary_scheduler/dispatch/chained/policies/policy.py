"""The seam between the dispatcher and whoever chooses chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.events import SessionRequested


class ChainPolicy(Protocol):
    """Which route a session takes. One object per model; it decides, the dispatcher keeps count.

    A policy may return routes it made itself, over any caches that are free, instead of the chains
    of the plan: a route is hops and the slots they take.
    """

    @property
    def central(self) -> bool:
        """True if who finds no free route waits in one queue for all.

        Otherwise a request is bound to a route when it arrives, free or not, and waits there, first
        come, first served.
        """
        ...

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """These are the routes from now on, in order of the plan; all their agents are there."""
        ...

    def choose(self, request: SessionRequested, tokens: int = 0) -> ChainState | None:
        """Returns the route for a request; None if there is none (if central: none free).

        Args:
            request: It.
            tokens: What its session will have cached when its prompt has run.
        """
        ...

    def offer(self, route: ChainState) -> None:
        """A session left this route."""
        ...

    def freed(self, cache: Cache) -> None:
        """Slots of this cache were freed."""
        ...
