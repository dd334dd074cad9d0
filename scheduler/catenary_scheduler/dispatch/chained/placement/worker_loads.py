"""The workers of one model and the sessions on them, according to reports.

Every chain is a worker; of a pair (split phase) each half is one. Reports of gateways are folded
into running sums, so that a decision only has to look at them (`placing.worker`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.placer_figures import (
    PLACED,
    PLACEMENT_COUNTERS,
    RERUN,
    PrefillShare,
)
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import SessionProgress, SessionRequested
from catenary_scheduler.dispatch.placing.adaptation import Adaptation
from catenary_scheduler.dispatch.placing.best_fit import PlacementRequest, last_moment
from catenary_scheduler.dispatch.placing.jobs import WorkerLimits
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.dispatch.placing.occupancy import RunningSequence
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Rebalancer
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds, RequestId
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import ChainHop, ModelPlan

GAMMA = 0.5
"""Half of an answer counts: the mean over its time, which ATGT measures."""
_LONGEST_HOLD_NS = NANOSECONDS_PER_SECOND
"""A request without an objective for its first token is held back for this long at most."""
UNKNOWN = LatencyLines(0.0, 0.0, 0.0, 0.0, 0.0)
"""The lines of chains of which nothing is known: only their number of sessions counts."""
_NO_OBJECTIVES = TokenObjectives()


class WorkerLoads:
    """Workers and sessions of one model.

    Attributes:
        lengths: Predicts answers; it learns from the caller that made the placer.
        adaptation: Theta, and attainment.
        counters: Counters by name; the caller that made the placer may put its own here.
        prompt_share: The share of time that prompts take.
        packs: True if sessions should be on few workers: new ones go to the fullest if none is
            harmed.
        is_packing: True if they are packed at the moment.
        rebalancer: Gathers errors of predictions; None if they are not used.
    """

    def __init__(self) -> None:
        self.lengths = LengthPredictor()
        self.adaptation = Adaptation()
        self.counters: dict[str, int] = dict.fromkeys(PLACEMENT_COUNTERS, 0)
        self.prompt_share = PrefillShare()
        self.packs = False
        self.is_packing = False
        self.rebalancer: Rebalancer[Worker] | None = None
        self._objectives: TokenObjectives | None = None
        self._lines: dict[tuple[ChainHop, ...], tuple[LatencyLines | None, float]] = {}
        self._workers: dict[ChainState, Worker] = {}
        self._routes: list[ChainState] = []
        """Routes that may be used, for prompts or for everything."""
        self._open: list[Worker] = []
        self._kinds: list[Worker] = []
        """One worker of each kind; workers of a kind are alike."""
        self._decode_routes: list[ChainState] = []
        """Routes that may be used to generate (split phase)."""
        self._decode_open: list[Worker] = []
        self._decode_kinds: list[Worker] = []
        self._pairs: dict[tuple[ChainState, ChainState], ChainState] = {}
        self._running: dict[RequestId, tuple[Worker, RunningSequence]] = {}
        self._coming: dict[RequestId, tuple[Worker, RunningSequence]] = {}
        """Target worker of each session that moves."""
        self._prompts: dict[RequestId, Worker] = {}
        """The worker that runs the prompt of each session without a token (split phase)."""

    # The plan

    def activate(self, plan: ModelPlan | None) -> None:
        """Takes objectives and lines of a plan; `rebuild` must follow."""
        self._objectives = plan.objectives if plan is not None else None
        self.packs = plan is not None and plan.packing == "pack"
        self._lines = {}
        for chain in plan.chains if plan is not None else ():
            self._lines[chain.hops] = (chain.lines, chain.cache_tokens or math.inf)

    def refit(self, lines: Iterable[tuple[tuple[ChainHop, ...], LatencyLines]]) -> None:
        """Takes new latency lines of chains."""
        for hops, fitted in lines:
            if hops in self._lines:
                self._lines[hops] = (fitted, self._lines[hops][1])
        for route, worker in self._workers.items():
            self._adopt(route, worker)
        self._kinds = _kinds(self._open)
        self._decode_kinds = _kinds(self._decode_open)

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Takes the routes to be used from now on; sessions on other routes still count there."""
        prefill = [route for route in routes if route.role == "prefill"]
        decode = [route for route in routes if route.role == "decode"]
        if prefill and decode:
            # Mixed routes beside pairs take prompts as pairs do; the choice of the pair decides
            # where they stay.
            self._decode_routes = decode
            self._routes = [route for route in routes if route.role != "decode"]
        else:
            self._decode_routes, self._routes = [], list(routes)
        here = set(routes)
        busy = {worker for worker, _ in [*self._running.values(), *self._coming.values()]}
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

    def _worker(self, route: ChainState) -> Worker:
        worker = self._workers.get(route)
        if worker is None:
            worker = self._workers[route] = Worker(UNKNOWN, WorkerLimits(0, 0, math.inf, GAMMA))
            self._adopt(route, worker)
        return worker

    def _adopt(self, route: ChainState, worker: Worker) -> None:
        lines, capacity = self._lines.get(route.hops, (None, math.inf))
        split = route.role == "decode"
        worker.adopt(lines or UNKNOWN, WorkerLimits(0, 0, capacity, GAMMA, 1.0, split))

    def running_of(self, request: RequestId) -> tuple[Worker, RunningSequence] | None:
        """Returns the worker and the running sequence of a request's session.

        None if it has none.
        """
        return self._running.get(request)

    def loads_of_requests(self) -> list[RequestId]:
        """Returns the requests whose sessions count as load."""
        return [*self._running, *self._prompts]

    def loads_of_moves(self) -> list[RequestId]:
        """Returns the requests whose sessions count as load at the target of a move."""
        return list(self._coming)

    def mixed(self) -> list[tuple[ChainState, Worker]]:
        """Returns the usable workers that both run prompts and generate."""
        both = zip(self._routes, self._open, strict=True)
        return [(route, worker) for route, worker in both if route.role == "mixed"]

    # Requests

    def objectives_of(self, event: SessionRequested) -> TokenObjectives | None:
        """Returns the objectives of a request; None if it has none."""
        found = event.objectives or self._objectives
        if found is None or not (found.first_token_ns or found.per_token_ns):
            return None
        return found

    def placement_request(
        self, event: SessionRequested, arrived: Nanoseconds, done: int = 0
    ) -> PlacementRequest:
        """Returns a request in the form that decisions take.

        Args:
            event: The request.
            arrived: Moment at which its gateway got it.
            done: Tokens of its answer that it has already; after a lost session they are run again
                as part of its prompt.
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
        return PlacementRequest(
            event.prompt_tokens + done, max(1.0, whole - done), first, due, objectives.per_token_ns
        )

    def prepare(self, sequence: SequenceRequest) -> PlacementRequest:
        """Computes what a request needs, and when it must be placed at the latest."""
        placement_request = self.placement_request(
            sequence.event, sequence.arrived, sequence.generated_tokens
        )
        sequence.placement_request = placement_request
        sequence.must_start = min(
            [last_moment(placement_request, each) for each in self._kinds], default=0
        )
        return placement_request

    # Sessions

    def start(self, sequence: SequenceRequest, route: ChainState, now: Nanoseconds) -> None:
        """Counts the session of a request on a route."""
        self.leave(sequence.request)
        placement_request = sequence.placement_request or self.prepare(sequence)
        prefill, decode = route.halves if route.halves is not None else (None, route)
        worker = self._worker(decode)
        running = RunningSequence(
            sequence.request,
            placement_request.prompt_tokens,
            placement_request.predicted_tokens,
            placement_request.per_token_ns,
            placement_request.due_ns,
            now,
        )
        running.carried_tokens = sequence.generated_tokens
        worker.add(running)
        self._running[sequence.request] = (worker, running)
        runs = worker
        if prefill is not None:
            runs = self._worker(prefill)
            # No session generates there, so a prompt can delay only other prompts.
            runs.add(
                RunningSequence(
                    sequence.request,
                    placement_request.prompt_tokens,
                    1.0,
                    0,
                    placement_request.due_ns,
                    now,
                )
            )
            self._prompts[sequence.request] = runs
        if placement_request.first_token_ns or placement_request.per_token_ns:
            self.counters[PLACED] += 1
        self.counters[RERUN] += running.carried_tokens
        self.prompt_share.took(runs.lines.prefill(placement_request.prompt_tokens), now)

    def leave(self, request: RequestId) -> None:
        """Stops counting a session that is over, or lost."""
        held = self._running.pop(request, None)
        if held is not None:
            held[0].remove(request)
        self._prompt_is_over(request)

    def _prompt_is_over(self, request: RequestId) -> None:
        worker = self._prompts.pop(request, None)
        if worker is not None:
            worker.remove(request)

    def progressed(self, sequence: SequenceRequest, progress: SessionProgress) -> None:
        """Counts new tokens of a session."""
        if progress.generated_tokens <= sequence.generated_tokens:
            return
        sequence.generated_tokens = progress.generated_tokens
        held = self._running.get(sequence.request)
        if held is None:
            return
        self._prompt_is_over(sequence.request)
        self._progress(*held, sequence, progress)
        coming = self._coming.get(sequence.request)
        if coming is not None:
            self._progress(*coming, sequence, progress)

    def _progress(
        self,
        worker: Worker,
        running: RunningSequence,
        sequence: SequenceRequest,
        progress: SessionProgress,
    ) -> None:
        first = sequence.arrived + progress.first_token_ns
        latest = first + progress.decode_ns
        began = first
        if running.carried_tokens:  # its prompt ran again, just before its first token here
            here = progress.generated_tokens - running.carried_tokens
            began = latest - round((here - 1) * worker.step_ns)
        worker.progressed(running, progress.generated_tokens, progress.decode_ns, latest, began)
        if running.generated_tokens > running.predicted_tokens:
            event = sequence.event
            whole = self.lengths.repredict(
                event.prompt_tokens, sequence.generated_tokens, event.max_tokens
            )
            worker.repredict(running, whole - running.carried_tokens)
            if self.rebalancer is not None:
                self.rebalancer.outgrew(worker, running.predicted_tokens)

    def look(self, now: Nanoseconds) -> None:
        """Updates all workers, so that the next decision need not."""
        for worker in self._open:
            worker.look(now)

    def ended(self, sequence: SequenceRequest, progress: SessionProgress) -> None:
        """Notes whether a finished request met its objectives."""
        held = self._running.get(sequence.request)
        if held is not None and self.rebalancer is not None:
            worker, running = held
            here = progress.generated_tokens - running.carried_tokens
            if here < running.predicted_tokens:
                self.rebalancer.ended_early(worker, running.predicted_tokens, here)
        objectives = self.objectives_of(sequence.event)
        if objectives is not None:
            first, each = objectives.first_token_ns, objectives.per_token_ns
            in_time = not first or progress.first_token_ns <= first
            steps = progress.generated_tokens - 1
            in_pace = not each or progress.decode_ns <= each * steps
            self.adaptation.ended(attained=in_time and in_pace, forced=sequence.forced)


def _kinds(workers: Iterable[Worker]) -> list[Worker]:
    """Returns one of all workers that have the same lines and the same capacity."""
    found: dict[tuple[LatencyLines, float], Worker] = {}
    for worker in workers:
        found.setdefault((worker.lines, worker.limits.cache_capacity), worker)
    return list(found.values())
