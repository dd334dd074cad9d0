"""One model: the chains of its plan, the requests that wait for them, and their rate of service."""

from __future__ import annotations

from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.chained.chain_state import ChainState, claims_of
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.chained.queues.failure_backoff import links_of
from catenary_scheduler.dispatch.chained.queues.placement_queue import PlacementQueue
from catenary_scheduler.dispatch.chained.queues.wait_queue import WaitQueue
from catenary_scheduler.dispatch.placing.prefix_directory import PrefixDirectory
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.plan import Chain, ChainHop, ModelPlan

_SMOOTHING = 16
"""A new gap between ends of sessions has a weight of one in this many."""


class ModelQueue:
    """The chains that serve one model, and the requests that wait for them.

    Attributes:
        model: The model.
        served: False if no plan has it.
        session_tokens: Most tokens of one session; 0 if unlimited.
        waiting: The waiting requests.
        usable: Number of whole chains: their agents are there and have loaded their parts.
        offered: The least impaired of the whole chains.
        must_rest: True if every offered chain has an agent, or a link, on which a session failed a
            moment ago.
        packing: The goal for which its sessions are moved.
        prefixes: Beliefs about what its chains have cached.
        placer: Keeps the load of each worker, for policies that need it; else None.
    """

    def __init__(self, model: ModelKey, policy: WaitQueue | SloPlacer, slots: SlotLedger) -> None:
        self.model = model
        self.served = False
        self.session_tokens = 0
        self.placer: SloPlacer | None = None
        if isinstance(policy, SloPlacer):
            self.placer = policy
            self.waiting: WaitQueue = PlacementQueue(policy)
        else:
            self.waiting = policy
        self.usable = 0
        self.offered: list[ChainState] = []
        self.must_rest = False
        self.packing: PackingGoal = "off"
        self.prefixes = PrefixDirectory()
        self._slots = slots
        self._routes: dict[tuple[ChainHop, ...], ChainState] = {}
        self._gap_ns = 0.0
        self._ended: Nanoseconds | None = None

    def activate(self, plan: ModelPlan | None) -> None:
        """Takes the chains of a plan, or none; chains that stay keep their sessions.

        Capacities of caches are the book's. `refresh` must follow.
        """
        self.served = plan is not None
        if self.placer is not None:
            self.placer.activate(plan)
        chains = plan.chains if plan is not None else ()
        self.session_tokens = plan.session_tokens if plan is not None else 0
        self.packing = plan.packing if plan is not None else "off"
        before, self._routes = self._routes, {}
        in_plan = {chain.hops for chain in chains}
        for hops, old in before.items():
            if old.running and hops not in in_plan:  # if the chain comes back, they count again
                old.capacity = 0
                self._routes[hops] = old
        for index, chain in enumerate(chains):
            claims = claims_of(chain.hops, self._slots)
            route = self._routes.get(chain.hops) or before.get(chain.hops)
            if route is None:
                route = ChainState(chain.chain_id, chain.hops, claims, 0, chain.service_ns, index)
            same = chain.hops in self._routes
            route.cache_tokens = self._tokens(chain) + (route.cache_tokens if same else 0)
            route.capacity = chain.capacity + (route.capacity if same else 0)
            route.chain_id, route.claims = chain.chain_id, claims
            route.service_ns, route.index = chain.service_ns, index
            lines = chain.lines
            if lines is not None:
                route.prompt_token_ns = lines.prefill_later_token_ns or lines.prefill_token_ns
            route.role, route.session_tokens = chain.role, self.session_tokens
            self._routes[chain.hops] = route
        for route in self._routes.values():
            if route.cache_tokens >= route.capacity * self.session_tokens > 0:
                route.cache_tokens = 0  # all of its sessions may have full length
        rate = sum(each.capacity / max(1, each.service_ns) for each in self._routes.values())
        self._gap_ns = 1 / rate if rate else 0.0
        self._ended = None

    def _tokens(self, chain: Chain) -> int:
        """Returns the tokens that a chain's caches hold, at most all sessions at full length."""
        most = chain.capacity * self.session_tokens
        return min(most, int(chain.cache_tokens)) if chain.cache_tokens else most

    def refresh(self, availability: Availability) -> None:
        """Offers the policy the least impaired of the whole chains."""
        found: list[tuple[int, ChainState]] = []
        for route in self._routes.values():
            if route.capacity > 0 and all(
                availability.can_serve(hop.agent, hop.partition) for hop in route.hops
            ):
                ranks = [availability.rank(hop.agent, hop.partition) for hop in route.hops]
                if _is_severed(route, availability):
                    ranks.append(int(Impairment.SUSPECTED))
                found.append((max(ranks), route))
        least = min([rank for rank, _ in found], default=0)
        routes = [route for rank, route in found if rank == least]
        self.usable = len(found)
        self.offered = routes
        self.must_rest = bool(routes) and all(_is_suspected(r, availability) for r in routes)
        self.waiting.rebuild(routes)

    def routes(self) -> list[ChainState]:
        """Returns all chains on which sessions of the model may be, also beside the plan."""
        return list(self._routes.values())

    def route_named(self, chain_id: str) -> ChainState | None:
        """Returns a chain of the plan by its name; None if there is none."""
        return next((r for r in self._routes.values() if r.chain_id == chain_id), None)

    def route_of(self, hops: tuple[ChainHop, ...]) -> ChainState:
        """Returns the chain with these hops, or a new route if the plan has none."""
        route = self._routes.get(hops)
        if route is None:
            route = self._routes[hops] = ChainState("", hops, claims_of(hops, self._slots), 0, 0)
        return route

    @property
    def is_over(self) -> bool:
        """True if no plan has the model, and none of its sessions is known to go on."""
        return not self.served and not any(each.running for each in self._routes.values())

    def session_ended(self, now: Nanoseconds) -> None:
        """Measures how often a session ends while others wait."""
        if not self.waiting:
            self._ended = None
            return
        if self._ended is not None:
            self._gap_ns += (now - self._ended - self._gap_ns) / _SMOOTHING
        self._ended = now

    def drained_after_ns(self) -> Nanoseconds:
        """Returns in how many nanoseconds the waiting requests should have started.

        0 if unknown.
        """
        return round(len(self.waiting) * self._gap_ns)


def _is_suspected(route: ChainState, availability: Availability) -> bool:
    suspected = Impairment.SUSPECTED
    return _is_severed(route, availability) or any(
        availability.mark_of(hop.agent, suspected) is not None for hop in route.hops
    )


def _is_severed(route: ChainState, availability: Availability) -> bool:
    return any(availability.are_severed(one, other) for one, other in links_of(route.hops))
