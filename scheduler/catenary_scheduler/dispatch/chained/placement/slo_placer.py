"""Policy "slo": chooses the worker of each request, and predicts its times there (Aladdin, 4).

A request takes a worker at once on which no session is harmed. Otherwise it is held back, since
what others have saved grows with every step, until it must be placed lest its first token be late
(`placing.best_fit`). Requests without objectives take the fastest worker with a free slot, but
their load counts. The slots of the book stay the hard limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.chain_state import ChainState, paired
from catenary_scheduler.dispatch.chained.placement.inadmissible import ObjectiveViolation, fault_of
from catenary_scheduler.dispatch.chained.placement.placement_requests import PlacementRequests
from catenary_scheduler.dispatch.chained.placement.placer_figures import FORCED, INADMISSIBLE
from catenary_scheduler.dispatch.chained.placement.session_loads import SessionLoads
from catenary_scheduler.dispatch.chained.placement.workers import UNKNOWN, ChainWorkers
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import SessionRequested
from catenary_scheduler.dispatch.placing.adaptation import Adaptation
from catenary_scheduler.dispatch.placing.best_fit import (
    NOBODY,
    PlacementRequest,
    fullest,
    least_harm,
    least_loaded,
)
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Rebalancer
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import Nanoseconds
from catenary_services.domain.plan import ModelPlan

Preferred = Callable[[int], ChainState | None]
_SPARE = 0.9
"""Steps should take no more than this share of the objective if there were one worker less."""


def _always(index: int) -> bool:
    return True


class SloPlacer:
    """Places the requests of one model on its workers.

    Args:
        slots: The slots of the book.

    Attributes:
        workers: The workers of the model.
        requests: What requests need.
        loads: The sessions on the workers.
        adaptation: Theta, and attainment.
        counters: Counters by name; see `connect`.
        packs: True if sessions should be on few workers: new ones go to the fullest if none is
            harmed.
        is_packing: True if they are packed at the moment.
    """

    def __init__(self, slots: SlotLedger) -> None:
        self.adaptation = Adaptation()
        self.workers = ChainWorkers()
        self.requests = PlacementRequests(self.workers)
        self.loads = SessionLoads(self.workers, self.requests, self.adaptation)
        self.counters = self.loads.counters
        self.packs = False
        self.is_packing = False
        self.preferred: Preferred | None = None
        """Returns the chain on which the packer of running sessions wants a new one of so many
        tokens."""
        self._slots = slots
        self._pairs: dict[tuple[ChainState, ChainState], ChainState] = {}
        self._tokens = 0
        """Tokens of the request in hand."""

    def connect(
        self,
        lengths: LengthPredictor,
        counters: dict[str, int],
        rebalancer: Rebalancer[Worker] | None,
    ) -> None:
        """Has the placer use what its caller keeps.

        Args:
            lengths: Predicts answers; it outlives the placer.
            counters: Counters by name.
            rebalancer: Gathers errors of predictions; None if they are not used.
        """
        self.requests.lengths = lengths
        self.counters = self.loads.counters = counters
        self.loads.rebalancer = rebalancer

    # The plan

    def activate(self, plan: ModelPlan | None) -> None:
        """Takes objectives and lines of a plan; `rebuild` must follow."""
        self.requests.objectives = plan.objectives if plan is not None else None
        self.packs = plan is not None and plan.packing == "pack"
        self.workers.activate(plan)

    def wait_for_batches(self, now: Nanoseconds) -> None:
        """Takes in how long steps wait for batches of other models on the same devices."""
        self.workers.wait_for_batches(self._slots, now)

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Takes the routes to be used from now on; sessions on other routes still count there."""
        here = set(routes)
        self._pairs = {
            halves: pair for halves, pair in self._pairs.items() if here.issuperset(halves)
        }
        self.workers.rebuild(routes, self.loads.busy())

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this route; this policy looks at all routes anyway."""

    def freed(self, cache: Cache) -> None:
        """Notes that slots of this cache were freed; this policy looks at all routes anyway."""

    # Decisions

    def fault(self, event: SessionRequested, now: Nanoseconds) -> ObjectiveViolation | None:
        """Returns the objective for which a request must be refused (R3); None if it may be served.

        A request that no empty worker can hold is refused in any case. A request that merely cannot
        be in time is refused if it named its objectives itself; one that has them from its model is
        served as soon as possible.
        """
        workers = self.workers
        if self.requests.objectives_of(event) is None or not workers.open:
            return None
        if any(worker.lines is UNKNOWN for worker in workers.kinds):  # such a worker may well do
            return None
        placement_request = self.requests.request_of(event, now)
        fault = fault_of(workers.kinds, workers.decode_kinds, placement_request)
        if fault is None:
            return None
        self.counters[INADMISSIBLE] += 1
        return fault if event.objectives is not None or fault.constraint == "e" else None

    @property
    def has_room(self) -> bool:
        """True if a worker has a free slot."""
        return any(self._has_slot(route) for route in self.workers.routes)

    def choose(self, sequence: SequenceRequest, now: Nanoseconds) -> ChainState | None:
        """Returns the route on which a request starts now; None if it has to wait."""
        placement_request = self._with_cached(sequence)
        self._tokens = sequence.tokens
        if not placement_request.first_token_ns and not placement_request.per_token_ns:
            index = self._packed(placement_request, now) if self.packs else NOBODY
            if index == NOBODY or not self.workers.open[index].running_sequences:
                index = self._unpacked(placement_request)
            return self._pair(index, placement_request, now)
        theta = self.adaptation.theta
        self.is_packing = self.packs and self.adaptation.is_safe and self._has_spare(now)
        if self.is_packing:
            index = self._packed(placement_request, now)
        else:
            index = self._least_loaded(placement_request, now, theta)
        if index == NOBODY and now >= sequence.must_start:
            index = least_harm(self.workers.open, placement_request, now, self._is_open)
            sequence.forced = index != NOBODY
            self.counters[FORCED] += sequence.forced
        return self._pair(index, placement_request, now)

    def _with_cached(self, sequence: SequenceRequest) -> PlacementRequest:
        """Returns what a request needs, with what workers have cached of its prompt now."""
        placement_request = sequence.placement_request or self.requests.prepare(sequence)
        cached = sequence.cached()
        if not cached and not placement_request.cached:
            return placement_request
        found: dict[Worker, int] = {}
        for index, route in enumerate(self.workers.routes):
            tokens = cached.get(route.hops, 0)
            if tokens:
                found[self.workers.open[index]] = tokens
        placement_request = sequence.placement_request = placement_request.with_cached(
            found, sequence.common_tokens()
        )
        return placement_request

    def expected(
        self, sequence: SequenceRequest, route: ChainState, now: Nanoseconds
    ) -> tuple[Nanoseconds, Nanoseconds]:
        """Returns predicted times of a request that starts now.

        Args:
            sequence: The request; it has no running sequence yet.
            route: The route on which it starts.
            now: The moment.

        Returns:
            Nanoseconds from its arrival to its first token, and per token after it; 0 if nothing is
                known.
        """
        placement_request = sequence.placement_request or self.requests.prepare(sequence)
        prefill, decode = route.halves if route.halves is not None else (route, route)
        runs, generates = self.workers.of(prefill), self.workers.of(decode)
        if runs.lines is UNKNOWN or generates.lines is UNKNOWN:
            return 0, 0
        runs.look(now)
        first = now - sequence.arrived + runs.ready_ns(placement_request.prompt_on(runs))
        step = generates.planned_step_ns(
            placement_request.prompt_tokens, placement_request.predicted_tokens
        )
        if runs is generates and generates.running_sequences:
            step /= 1.0 - self.loads.prompt_share.of_each(len(self.workers.open), now)
        return round(first), round(step)

    def _least_loaded(
        self, placement_request: PlacementRequest, now: Nanoseconds, theta: float
    ) -> int:
        """Returns the worker for a request with objectives, among those on which c-e hold."""
        return least_loaded(self.workers.open, placement_request, now, theta, self._is_open)

    def _least_loaded_decode(self, generating: PlacementRequest, now: Nanoseconds) -> int:
        """Returns the worker that generates for a session whose prompt runs elsewhere."""
        return least_loaded(self.workers.decode_open, generating, now, 1.0, self._is_decode_open)

    def _unpacked(self, placement_request: PlacementRequest) -> int:
        """Returns the worker for a request without objectives that nobody is packed with.

        It is the fastest one with a free slot, by what it has cached of the prompt, the least
        loaded of equals.
        """
        best, least = NOBODY, (math.inf, math.inf)
        for index, route in enumerate(self.workers.routes):
            worker = self.workers.open[index]
            left_ns = route.service_ns - placement_request.saved_ns(worker)
            key = (left_ns, float(len(worker.running_sequences)))
            if key < least and self._is_free(route):
                best, least = index, key
        return best

    def _packed(self, placement_request: PlacementRequest, now: Nanoseconds) -> int:
        """Returns the worker that keeps sessions together, among those on which b-e hold.

        It is the one where the packer of running sessions would put the session, so that it need
        not move; if that harms it or others, it is the fullest worker (Algorithm 1).
        """
        theta = self.adaptation.theta
        share = self.loads.prompt_share.of_each(len(self.workers.open), now)
        wanted = self.preferred(self._tokens) if self.preferred is not None else None
        for index, route in enumerate(self.workers.routes):
            if route is wanted and self._is_free(route):
                mine = self.workers.open[index : index + 1]
                if fullest(mine, placement_request, now, theta, _always, share) != NOBODY:
                    return index
        return fullest(self.workers.open, placement_request, now, theta, self._is_open, share)

    def _pair(
        self, index: int, placement_request: PlacementRequest, now: Nanoseconds
    ) -> ChainState | None:
        """Returns the route of a worker, paired with one that generates if it only runs prompts."""
        if index == NOBODY:
            return None
        route = self.workers.routes[index]
        if not self.workers.decode_routes or route.role != "prefill":
            return route
        generating = PlacementRequest(
            placement_request.prompt_tokens,
            placement_request.predicted_tokens,
            0,
            0,
            placement_request.per_token_ns,
        )
        other = self._least_loaded_decode(generating, now)
        if other == NOBODY:
            return None
        halves = (route, self.workers.decode_routes[other])
        pair = self._pairs.get(halves)
        if pair is None:
            pair = self._pairs[halves] = paired(*halves)
        return pair

    def _is_open(self, index: int) -> bool:
        return self._is_free(self.workers.routes[index])

    def _is_decode_open(self, index: int) -> bool:
        return self._is_free(self.workers.decode_routes[index])

    def is_short_of_tokens(self, sequence: SequenceRequest) -> bool:
        """True if workers have free slots, and none of these has memory for a request."""
        free = [route for route in self.workers.routes if self._has_slot(route)]
        return bool(free) and not any(route.has_room(sequence.tokens) for route in free)

    def _is_free(self, route: ChainState) -> bool:
        return self._has_slot(route) and route.has_room(self._tokens)

    def _has_slot(self, route: ChainState) -> bool:
        return route.running < route.capacity and self._slots.probe(route.claims) is None

    def _has_spare(self, now: Nanoseconds) -> bool:
        """True if one worker less would suffice, judged by the time of steps (b)."""
        workers = [worker for worker in self.workers.open if worker.running_sequences]
        used = sum(len(worker.running_sequences) for worker in workers)
        if len(self.workers.open) < 2 or not used:
            return len(self.workers.open) > 1
        tightest = min(worker.tightest_ns for worker in workers)
        context = sum(worker.context_tokens for worker in workers)
        fewer = len(self.workers.open) - 1
        lines = self.workers.open[0].lines
        share = max(2, math.ceil(used / fewer))
        step = lines.decode(share, context / fewer) * (
            1.0 + self.loads.prompt_share.of_each(fewer, now)
        )
        return step <= _SPARE * tightest
