"""Where requests wait under policies that bind them when they arrive: each at its chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.policies.policy import Policy
from catenary_scheduler.dispatch.chained.routes import Route
from catenary_scheduler.dispatch.chained.tracking import Ticket
from catenary_services.domain.ids import Nanoseconds, ResourceId


class BoundQueues:
    """A queue at every route; a request keeps the route it was given, unless that goes away."""

    def __init__(self, policy: Policy, slots: SlotLedger) -> None:
        self._policy = policy
        self._slots = slots
        self._tickets: dict[Ticket, None] = {}
        self._queues: dict[Route, deque[Ticket]] = {}
        """Who waits at each route, first come first; `Route.bound` says how many they are."""
        self._look: dict[Route, None] = {}
        """Routes where somebody may start."""
        self._blocked: dict[ResourceId, list[Route]] = {}
        """Routes that wait for slots of a cache although they are not full."""

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, ticket: Ticket) -> None:
        """Binds a request to the route the policy chooses and has it wait there."""
        self._tickets[ticket] = None
        self._bind(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Has a request wait no more."""
        if ticket in self._tickets:
            del self._tickets[ticket]
            self._unbind(ticket)

    def next(self, now: Nanoseconds) -> tuple[Ticket, Route] | None:
        """Returns the first of a queue at a route that is free."""
        while self._look:
            route = next(iter(self._look))
            queue = self._queues.get(route)
            if queue and route.running < route.capacity:
                lacking = self._slots.probe(route.claims)
                ticket = queue[0]
                if lacking is not None:
                    self._blocked.setdefault(lacking.resource, []).append(route)
                elif route.has_room(ticket.tokens):
                    self.remove(ticket)
                    return ticket, route
                else:  # any of them may have too few tokens left
                    for cache in route.claims.caches:
                        self._blocked.setdefault(cache.resource, []).append(route)
            del self._look[route]
        return None

    def wakeup(self) -> Nanoseconds | None:
        """Returns None: routes become free by events only."""
        return None

    def tickets(self) -> list[Ticket]:
        """Returns who waits, in order of arrival."""
        return sorted(self._tickets, key=_arrival)

    def rebuild(self, routes: Sequence[Route]) -> None:
        """Binds everybody anew who waits at a route that is gone, or at none."""
        self._policy.rebuild(routes)
        here = set(routes)
        homeless = [t for t in self.tickets() if t.route is None or t.route not in here]
        for ticket in homeless:
            self._unbind(ticket)
        for ticket in homeless:
            self._bind(ticket)
        self._blocked.clear()
        self._look = dict.fromkeys(routes)

    def offer(self, route: Route) -> None:
        """A session left this route."""
        self._policy.offer(route)
        self._look[route] = None

    def freed(self, cache: Cache) -> None:
        """Slots of this cache were freed."""
        self._policy.freed(cache)
        for route in self._blocked.pop(cache.resource, ()):
            self._look[route] = None

    def _bind(self, ticket: Ticket) -> None:
        route = ticket.route = self._policy.choose(ticket.event, ticket.tokens)
        if route is None:
            return
        queue = self._queues.setdefault(route, deque())
        ahead = sum(1 for other in queue if other.again) if ticket.again else None
        queue.insert(len(queue) if ahead is None else ahead, ticket)
        route.bound = len(queue)
        self._look[route] = None

    def _unbind(self, ticket: Ticket) -> None:
        route = ticket.route
        if route is None:
            return
        queue = self._queues[route]
        queue.remove(ticket)
        route.bound = len(queue)
        if not queue:
            del self._queues[route]
        ticket.route = None


def _arrival(ticket: Ticket) -> tuple[bool, int]:
    return (not ticket.again, ticket.sequence)
