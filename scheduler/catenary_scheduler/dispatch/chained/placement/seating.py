"""The workers of one model and who is on them, as reports have it.

Every chain is a worker; of a pair (split phase) each half is one. What gateways report is folded
into running sums, so that a decision only has to look at them (`placing.worker`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from catenary_scheduler.dispatch.chained.placement.board_figures import (
    PLACED,
    PLACEMENT_COUNTERS,
    RERUN,
    PromptShare,
)
from catenary_scheduler.dispatch.chained.routes import Route
from catenary_scheduler.dispatch.chained.tracking import Ticket
from catenary_scheduler.dispatch.events import SessionProgress, SessionRequested
from catenary_scheduler.dispatch.placing.adaptation import Adaptation
from catenary_scheduler.dispatch.placing.best_fit import Asked, last_moment
from catenary_scheduler.dispatch.placing.jobs import Limits
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.dispatch.placing.occupancy import Seat
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Rebalancer
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds, RequestId
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import ChainHop, ModelPlan

GAMMA = 0.5
"""Half of an answer counts: the mean over its time, which ATGT measures."""
_LONGEST_HOLD_NS = NANOSECONDS_PER_SECOND
"""A request without an objective for its first token is held back for so long at most."""
UNKNOWN = LatencyLines(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of chains nothing is known of: only their sessions count."""
_NO_OBJECTIVES = TokenObjectives()


class Seating:
    """Workers and sessions of one model.

    Attributes:
        lengths: Predicts answers; whoever made the board has it learn.
        adaptation: Theta, and attainment.
        counters: What is counted, by name; whoever made the board may put its own here.
        prompt_share: How much of the time prompts take.
        packs: Sessions should be on few workers: new ones, if nobody is harmed, go to the fullest.
        is_packing: They do at the moment.
        rebalancer: Gathers what predictions got wrong; None: nobody wants to know.
    """

    def __init__(self) -> None:
        self.lengths = LengthPredictor()
        self.adaptation = Adaptation()
        self.counters: dict[str, int] = dict.fromkeys(PLACEMENT_COUNTERS, 0)
        self.prompt_share = PromptShare()
        self.packs = False
        self.is_packing = False
        self.rebalancer: Rebalancer[Worker] | None = None
        self._objectives: TokenObjectives | None = None
        self._lines: dict[tuple[ChainHop, ...], tuple[LatencyLines | None, float]] = {}
        self._workers: dict[Route, Worker] = {}
        self._routes: list[Route] = []
        """Those that may be used: for prompts, or for everything."""
        self._open: list[Worker] = []
        self._kinds: list[Worker] = []
        """One of all that are alike."""
        self._decode_routes: list[Route] = []
        """Of a split phase: those that generate."""
        self._decode_open: list[Worker] = []
        self._decode_kinds: list[Worker] = []
        self._pairs: dict[tuple[Route, Route], Route] = {}
        self._seats: dict[RequestId, tuple[Worker, Seat]] = {}
        self._coming: dict[RequestId, tuple[Worker, Seat]] = {}
        """Of sessions that move: where to."""
        self._prompts: dict[RequestId, Worker] = {}
        """Of a split phase: where the prompts run of sessions without a token."""

    # The plan

    def activate(self, plan: ModelPlan | None) -> None:
        """Takes objectives and lines of a plan; `rebuild` must follow."""
        self._objectives = plan.objectives if plan is not None else None
        self.packs = plan is not None and plan.packing == "pack"
        self._lines = {}
        for chain in plan.chains if plan is not None else ():
            self._lines[chain.hops] = (chain.lines, chain.cache_tokens or math.inf)

    def refit(self, lines: Iterable[tuple[tuple[ChainHop, ...], LatencyLines]]) -> None:
        """Lines of chains were fitted anew."""
        for hops, fitted in lines:
            if hops in self._lines:
                self._lines[hops] = (fitted, self._lines[hops][1])
        for route, worker in self._workers.items():
            self._adopt(route, worker)
        self._kinds = _kinds(self._open)
        self._decode_kinds = _kinds(self._decode_open)

    def rebuild(self, routes: Sequence[Route]) -> None:
        """These may be used from now on, by their roles; sessions elsewhere still count there."""
        prefill = [route for route in routes if route.role == "prefill"]
        decode = [route for route in routes if route.role == "decode"]
        if prefill and decode:
            # Mixed ones beside pairs take prompts as pairs do; where they stay is decided there.
            self._decode_routes = decode
            self._routes = [route for route in routes if route.role != "decode"]
        else:
            self._decode_routes, self._routes = [], list(routes)
        here = set(routes)
        busy = {worker for worker, _ in [*self._seats.values(), *self._coming.values()]}
        busy.update(self._prompts.values())
        self._workers = {
            route: worker
            for route, worker in self._workers.items()
            if route in here or worker in busy
        }
        self._pairs = {
            halves: pair for halves, pair in self._pairs.items() if here.issuperset(halves)
        }
        for route, worker in self._workers.items():
            self._adopt(route, worker)
        self._open = [self._worker(route) for route in self._routes]
        self._decode_open = [self._worker(route) for route in self._decode_routes]
        self._kinds = _kinds(self._open)
        self._decode_kinds = _kinds(self._decode_open)

    def _worker(self, route: Route) -> Worker:
        worker = self._workers.get(route)
        if worker is None:
            worker = self._workers[route] = Worker(UNKNOWN, Limits(0, 0, math.inf, GAMMA))
            self._adopt(route, worker)
        return worker

    def _adopt(self, route: Route, worker: Worker) -> None:
        lines, capacity = self._lines.get(route.hops, (None, math.inf))
        split = route.role == "decode"
        worker.adopt(lines or UNKNOWN, Limits(0, 0, capacity, GAMMA, 1.0, split))

    def seat_of(self, request: RequestId) -> tuple[Worker, Seat] | None:
        """Returns where a session is."""
        return self._seats.get(request)

    def mixed(self) -> list[tuple[Route, Worker]]:
        """Returns the workers that may be used and do both, run prompts and generate."""
        both = zip(self._routes, self._open, strict=True)
        return [(route, worker) for route, worker in both if route.role == "mixed"]

    # Requests

    def objectives_of(self, event: SessionRequested) -> TokenObjectives | None:
        """Returns what a request is held to; None: it is served as well as may be."""
        found = event.objectives or self._objectives
        if found is None or not (found.first_token_ns or found.per_token_ns):
            return None
        return found

    def asked(self, event: SessionRequested, arrived: Nanoseconds, done: int = 0) -> Asked:
        """Returns a request as decisions take it.

        Args:
            event: The request.
            arrived: When its gateway got it.
            done: Tokens of its answer that it has already; who lost a session runs them again as
                part of its prompt.
        """
        objectives = self.objectives_of(event) or _NO_OBJECTIVES
        if done:
            whole = self.lengths.repredict(event.prompt_tokens, done, event.max_tokens)
        else:
            whole = self.lengths.predict(event.prompt_tokens, event.max_tokens)
        first = objectives.first_token_ns
        due = 0
        if not done and first:
            due = arrived + first
        elif not done and objectives.per_token_ns:
            due = arrived + _LONGEST_HOLD_NS
        return Asked(
            event.prompt_tokens + done, max(1.0, whole - done), first, due, objectives.per_token_ns
        )

    def prepare(self, ticket: Ticket) -> Asked:
        """Notes what a request needs, and when it must be placed at the latest."""
        asked = self.asked(ticket.event, ticket.arrived, ticket.generated_tokens)
        ticket.asked = asked
        ticket.must_start = min([last_moment(asked, each) for each in self._kinds], default=0)
        return asked

    # Sessions

    def seat(self, ticket: Ticket, route: Route, now: Nanoseconds) -> None:
        """A request has a session on this route."""
        self.leave(ticket.request)
        asked = ticket.asked or self.prepare(ticket)
        prefill, decode = route.halves if route.halves is not None else (None, route)
        worker = self._worker(decode)
        seat = Seat(
            ticket.request,
            asked.prompt_tokens,
            asked.predicted_tokens,
            asked.per_token_ns,
            asked.due_ns,
            now,
        )
        seat.carried_tokens = ticket.generated_tokens
        worker.add(seat)
        self._seats[ticket.request] = (worker, seat)
        runs = worker
        if prefill is not None:
            runs = self._worker(prefill)
            # Nobody generates there, so no prompt can hold anybody up but other prompts.
            runs.add(Seat(ticket.request, asked.prompt_tokens, 1.0, 0, asked.due_ns, now))
            self._prompts[ticket.request] = runs
        if asked.first_token_ns or asked.per_token_ns:
            self.counters[PLACED] += 1
        self.counters[RERUN] += seat.carried_tokens
        self.prompt_share.took(runs.lines.prefill(asked.prompt_tokens), now)

    def leave(self, request: RequestId) -> None:
        """A session is over, or lost."""
        held = self._seats.pop(request, None)
        if held is not None:
            held[0].remove(request)
        self._prompt_is_over(request)

    def _prompt_is_over(self, request: RequestId) -> None:
        worker = self._prompts.pop(request, None)
        if worker is not None:
            worker.remove(request)

    def progressed(self, ticket: Ticket, progress: SessionProgress) -> None:
        """A session has got tokens."""
        if progress.generated_tokens <= ticket.generated_tokens:
            return
        ticket.generated_tokens = progress.generated_tokens
        held = self._seats.get(ticket.request)
        if held is None:
            return
        self._prompt_is_over(ticket.request)
        self._progress(*held, ticket, progress)
        coming = self._coming.get(ticket.request)
        if coming is not None:
            self._progress(*coming, ticket, progress)

    def _progress(
        self, worker: Worker, seat: Seat, ticket: Ticket, progress: SessionProgress
    ) -> None:
        first = ticket.arrived + progress.first_token_ns
        latest = first + progress.decode_ns
        began = first
        if seat.carried_tokens:  # its prompt ran again, just before the first token it got here
            here = progress.generated_tokens - seat.carried_tokens
            began = latest - round((here - 1) * worker.step_ns)
        worker.progressed(seat, progress.generated_tokens, progress.decode_ns, latest, began)
        if seat.generated_tokens > seat.predicted_tokens:
            event = ticket.event
            whole = self.lengths.repredict(
                event.prompt_tokens, ticket.generated_tokens, event.max_tokens
            )
            worker.repredict(seat, whole - seat.carried_tokens)
            if self.rebalancer is not None:
                self.rebalancer.outgrew(worker, seat.predicted_tokens)

    def look(self, now: Nanoseconds) -> None:
        """Brings all workers up to date, so that the next decision need not."""
        for worker in self._open:
            worker.look(now)

    def ended(self, ticket: Ticket, progress: SessionProgress) -> None:
        """A request has its whole answer: did it meet its objectives?"""
        held = self._seats.get(ticket.request)
        if held is not None and self.rebalancer is not None:
            worker, seat = held
            here = progress.generated_tokens - seat.carried_tokens
            if here < seat.predicted_tokens:
                self.rebalancer.ended_early(worker, seat.predicted_tokens, here)
        objectives = self.objectives_of(ticket.event)
        if objectives is not None:
            first, each = objectives.first_token_ns, objectives.per_token_ns
            in_time = not first or progress.first_token_ns <= first
            steps = progress.generated_tokens - 1
            in_pace = not each or progress.decode_ns <= each * steps
            self.adaptation.ended(attained=in_time and in_pace, forced=ticket.forced)


def _kinds(workers: Iterable[Worker]) -> list[Worker]:
    """Returns one of all that have the same lines and the same capacity."""
    found: dict[tuple[LatencyLines, float], Worker] = {}
    for worker in workers:
        found.setdefault((worker.lines, worker.limits.cache_capacity), worker)
    return list(found.values())
