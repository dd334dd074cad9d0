"""Re-balances the sessions that were started in the event in hand (Aladdin, Algorithm 2).

The gateway has not been told of them yet, so a start can be taken back. Constraints b-e must hold,
to the letter, on every worker that gains a session (reading R15), and it needs a free slot there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.placer_figures import PLACED
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.chained.placement.workers import UNKNOWN
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.sessions.booking import SessionBooking
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.placing.constraints import PaperReadings, examine
from catenary_scheduler.dispatch.placing.jobs import WorkerLimits
from catenary_scheduler.dispatch.placing.occupancy import RunningSequence
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import UnstartedPlacement
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import Nanoseconds

_READINGS = PaperReadings(strict_slack=True)


class SessionRebalancing:
    """Moves starts to other workers if that evens out errors of predictions.

    Args:
        table: The state; its commands hold the starts.
        booking: Begins sessions, and takes that back.
        ledger: Has requests wait again.
    """

    def __init__(self, table: SessionTable, booking: SessionBooking, ledger: RequestLedger) -> None:
        self._table = table
        self._booking = booking
        self._ledger = ledger

    def rebalance(self, model_queue: ModelQueue, started: Sequence[SequenceRequest]) -> bool:
        """Moves some of the starts of a model.

        Args:
            model_queue: The queue of the model.
            started: The requests whose sessions were started in this event.

        Returns:
            True if a request lost its place and waits again.
        """
        table = self._table
        placer = model_queue.placer
        if placer is None or placer.loads.rebalancer is None:
            return False
        workers = {
            worker: route for route, worker in placer.workers.mixed() if worker.lines is not UNKNOWN
        }
        placed: list[tuple[SequenceRequest, Worker, RunningSequence]] = []
        for sequence in started:
            held = placer.loads.running_of(sequence.request)
            if held is not None and held[0] in workers:
                placed.append((sequence, *held))
        moves = placer.loads.rebalancer.settle(
            {worker: worker.lines for worker in workers},
            [UnstartedPlacement(worker, running.predicted_tokens) for _, worker, running in placed],
            _Check(placer, workers, placed, table.now),
        )
        changed = [
            (placed[number][0], workers[worker], workers[placed[number][1]])
            for number, worker in moves.items()
        ]
        for sequence, _, _ in changed:
            self._booking.unstart(sequence)
            if placer.requests.objectives_of(sequence.event) is not None:
                placer.counters[PLACED] -= 1  # it will be counted again
        table.counters["rebalanced_sessions"] += len(changed)
        lost = False
        for sequence, route, before in changed:
            for each in (route, before):
                if each.running < each.capacity and table.slots.probe(each.claims) is None:
                    self._booking.start(sequence, each)
                    break
            else:  # chains that share a cache: its last slots are gone
                self._ledger.wait_again(sequence)
                lost = True
        return lost


class _Check:
    """Tells whether a worker may have some of the sessions that were placed."""

    def __init__(
        self,
        placer: SloPlacer,
        routes: dict[Worker, ChainState],
        placed: Sequence[tuple[SequenceRequest, Worker, RunningSequence]],
        now: Nanoseconds,
    ) -> None:
        self._theta = placer.adaptation.theta
        self._routes = routes
        self._placed = placed
        self._now = now
        self._new = {sequence.request for sequence, _, _ in placed}

    def __call__(self, worker: Worker, requests: Sequence[int]) -> bool:
        """Returns True if slots and b-e allow it."""
        route = self._routes[worker]
        there = sum(1 for _, at, _ in self._placed if at is worker)
        if route.running - there + len(requests) > route.capacity:
            return False
        running_sequences = [self._placed[number][2] for number in requests]
        others = [
            running
            for running in worker.running_sequences.values()
            if running.request not in self._new
        ]
        *jobs, last = (running.job() for running in [*others, *running_sequences])
        limits = self._limits(worker, [*others, *running_sequences])
        return examine(worker.lines, limits, jobs, last, _READINGS).ok

    def _limits(self, worker: Worker, running_sequences: Sequence[RunningSequence]) -> WorkerLimits:
        """Returns the tightest limits of these sessions at this moment."""
        due = min(
            (running.due_ns for running in running_sequences if running.is_new and running.due_ns),
            default=0,
        )
        pace = min(
            (running.per_token_ns for running in running_sequences if running.per_token_ns),
            default=0,
        )
        return WorkerLimits(
            first_token_ns=max(1, due - self._now) if due else 0,
            per_token_ns=pace,
            cache_capacity=worker.limits.cache_capacity or math.inf,
            gamma=worker.limits.gamma,
            theta=self._theta,
        )
