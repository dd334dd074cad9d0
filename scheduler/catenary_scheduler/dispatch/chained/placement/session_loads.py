"""The sessions of one model as load of its workers, according to reports.

Reports of gateways are folded into running sums, so that a decision only has to look at them
(`placing.worker`). A session that moves counts at both workers until its move is over: it runs on
one and is about to run on the other. So no request is placed on what it leaves before it has left,
nor on what it takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.placement_requests import PlacementRequests
from catenary_scheduler.dispatch.chained.placement.placer_figures import (
    PLACED,
    PLACEMENT_COUNTERS,
    RERUN,
    PrefillShare,
)
from catenary_scheduler.dispatch.chained.placement.workers import GAMMA, ChainWorkers
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import SessionProgress
from catenary_scheduler.dispatch.placing.adaptation import Adaptation
from catenary_scheduler.dispatch.placing.occupancy import RunningSequence
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Rebalancer
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import Nanoseconds, RequestId

_ROUNDING = 1e-6
"""Running sums of floats are off by this much at most."""


class SessionLoads:
    """Counts the sessions of one model.

    Args:
        workers: The workers.
        requests: Tells what a request needs.
        adaptation: Told which requests met their objectives.

    Attributes:
        counters: Counters by name; the caller that made the placer may put its own here.
        prompt_share: The share of time that prompts take.
        rebalancer: Gathers errors of predictions; None if they are not used.
    """

    def __init__(
        self, workers: ChainWorkers, requests: PlacementRequests, adaptation: Adaptation
    ) -> None:
        self.counters: dict[str, int] = dict.fromkeys(PLACEMENT_COUNTERS, 0)
        self.prompt_share = PrefillShare()
        self.rebalancer: Rebalancer[Worker] | None = None
        self._workers = workers
        self._requests = requests
        self._adaptation = adaptation
        self._running: dict[RequestId, tuple[Worker, RunningSequence]] = {}
        self._coming: dict[RequestId, tuple[Worker, RunningSequence]] = {}
        """Target worker of each session that moves."""
        self._prompts: dict[RequestId, Worker] = {}
        """The worker that runs the prompt of each session without a token (split phase)."""

    def busy(self) -> set[Worker]:
        """Returns the workers that have sessions."""
        busy = {worker for worker, _ in [*self._running.values(), *self._coming.values()]}
        busy.update(self._prompts.values())
        return busy

    def running_of(self, request: RequestId) -> tuple[Worker, RunningSequence] | None:
        """Returns the worker and the running sequence of a request's session.

        None if it has none.
        """
        return self._running.get(request)

    def start(self, sequence: SequenceRequest, route: ChainState, now: Nanoseconds) -> None:
        """Counts the session of a request on a route."""
        self.leave(sequence.request)
        placement_request = sequence.placement_request or self._requests.prepare(sequence)
        prefill, decode = route.halves if route.halves is not None else (None, route)
        worker = self._workers.of(decode)
        running = RunningSequence(
            sequence.request,
            placement_request.prompt_tokens,
            placement_request.predicted_tokens,
            placement_request.per_token_ns,
            placement_request.due_ns,
            now,
        )
        running.carried_tokens = sequence.generated_tokens
        running.cached_tokens = placement_request.cached.get(worker, 0)
        worker.add(running)
        self._running[sequence.request] = (worker, running)
        runs = worker
        if prefill is not None:
            runs = self._workers.of(prefill)
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
        self.prompt_share.took(runs.lines.prefill(placement_request.prompt_on(runs)), now)

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

    # Moves

    def reserve(
        self, sequence: SequenceRequest, route: ChainState, now: Nanoseconds, *, runs_again: bool
    ) -> None:
        """Counts a session that moves at its target too; it keeps its running sequence.

        Args:
            sequence: Its request.
            route: The route that it moves to.
            now: The moment.
            runs_again: True if its tokens are computed again there, which delays the sessions
                there.
        """
        held = self._running.get(sequence.request)
        if held is None:
            return
        worker, running = self._workers.of(route), held[1].copied()
        worker.add(running)
        self._coming[sequence.request] = (worker, running)
        if runs_again:
            tokens = running.prompt_tokens + running.generated_tokens
            self.prompt_share.took(worker.lines.prefill(tokens), now)

    def unreserve(self, request: RequestId) -> None:
        """Stops counting a session at the target of a move that failed."""
        held = self._coming.pop(request, None)
        if held is not None:
            held[0].remove(request)

    def moved(self, request: RequestId) -> None:
        """Counts a session only at the target of its move, where it generates now."""
        coming = self._coming.pop(request, None)
        self.leave(request)
        if coming is not None:
            self._running[request] = coming

    # Progress

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
            whole = self._requests.lengths.repredict(
                event.prompt_tokens, sequence.generated_tokens, event.max_tokens
            )
            worker.repredict(running, whole - running.carried_tokens)
            if self.rebalancer is not None:
                self.rebalancer.outgrew(worker, running.predicted_tokens)

    def ended(self, sequence: SequenceRequest, progress: SessionProgress) -> None:
        """Notes whether a finished request met its objectives."""
        held = self._running.get(sequence.request)
        if held is not None and self.rebalancer is not None:
            worker, running = held
            here = progress.generated_tokens - running.carried_tokens
            if here < running.predicted_tokens:
                self.rebalancer.ended_early(worker, running.predicted_tokens, here)
        objectives = self._requests.objectives_of(sequence.event)
        if objectives is not None:
            first, each = objectives.first_token_ns, objectives.per_token_ns
            in_time = not first or progress.first_token_ns <= first
            steps = progress.generated_tokens - 1
            in_pace = not each or progress.decode_ns <= each * steps
            self._adaptation.ended(attained=in_time and in_pace, forced=sequence.forced)

    def faults(self, owned: set[RequestId], moving: set[RequestId]) -> Iterator[str]:
        """Yields in words what contradicts itself here; nothing unless there is a bug.

        Args:
            owned: The requests that have a session.
            moving: Those of them whose session moves.
        """
        if not self._running.keys() <= owned:
            yield "a request without a session counts as load"
        if not self._prompts.keys() <= self._running.keys():
            yield "a prompt counts as load without its session"
        if not self._coming.keys() <= moving:
            yield "a session that does not move counts as load at a target"
        for worker in self._workers.all():
            for request, running in worker.running_sequences.items():
                places = [self._running.get(request), self._coming.get(request)]
                is_here = any(place is not None and place[1] is running for place in places)
                if not is_here and self._prompts.get(request) is not worker:
                    yield f"{request} is load of a worker that nobody remembers"
            here = worker.running_sequences.values()
            context = sum(each.prompt_tokens + GAMMA * each.final_tokens for each in here)
            if abs(worker.context_tokens - context) > _ROUNDING:
                yield f"a worker counts {worker.context_tokens} tokens of {context}"
