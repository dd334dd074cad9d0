"""Re-balancing of sessions that were started in this very event (Aladdin, Algorithm 2).

The gateway has not been told of them yet, so a start can be taken back. Constraints b-e must hold,
to the letter, on every worker that gains a session (reading R15), and it needs a free slot there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from catenary_scheduler.dispatch.chained.placement.board import Board
from catenary_scheduler.dispatch.chained.placement.board_figures import PLACED
from catenary_scheduler.dispatch.chained.placement.seating import UNKNOWN
from catenary_scheduler.dispatch.chained.queues.desk import Desk
from catenary_scheduler.dispatch.chained.routes import Route
from catenary_scheduler.dispatch.chained.sessions.ledger import ChainLedger
from catenary_scheduler.dispatch.chained.tracking import Ticket
from catenary_scheduler.dispatch.placing.constraints import Readings, examine
from catenary_scheduler.dispatch.placing.jobs import Limits
from catenary_scheduler.dispatch.placing.occupancy import Seat
from catenary_scheduler.dispatch.placing.rebalancing.rebalancer import Placed
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import Nanoseconds

_READINGS = Readings(strict_slack=True)


def resettle(life: ChainLedger, desk: Desk, started: Sequence[Ticket]) -> bool:
    """Has sessions begin elsewhere if that evens out what predictions got wrong.

    Args:
        life: The state; its commands hold the starts.
        desk: Of their model.
        started: Whose sessions were started in this event.

    Returns:
        True if somebody lost the place that was taken back, and waits again.
    """
    board = desk.board
    if board is None or board.rebalancer is None:
        return False
    workers = {worker: route for route, worker in board.mixed() if worker.lines is not UNKNOWN}
    placed: list[tuple[Ticket, Worker, Seat]] = []
    for ticket in started:
        held = board.seat_of(ticket.request)
        if held is not None and held[0] in workers:
            placed.append((ticket, *held))
    moves = board.rebalancer.settle(
        {worker: worker.lines for worker in workers},
        [Placed(worker, seat.predicted_tokens) for _, worker, seat in placed],
        _Check(board, workers, placed, life.now),
    )
    changed = [
        (placed[number][0], workers[worker], workers[placed[number][1]])
        for number, worker in moves.items()
    ]
    for ticket, _, _ in changed:
        life.unstart(ticket)
        if board.objectives_of(ticket.event) is not None:
            board.counters[PLACED] -= 1  # it will be counted again
    life.counters["rebalanced_sessions"] += len(changed)
    lost = False
    for ticket, route, before in changed:
        for each in (route, before):
            if each.running < each.capacity and life.slots.probe(each.claims) is None:
                life.start(ticket, each)
                break
        else:  # chains that share a cache: somebody else of these took its last slots
            life.again(ticket)
            lost = True
    return lost


class _Check:
    """Says whether a worker may have some of the sessions that were placed."""

    def __init__(
        self,
        board: Board,
        routes: dict[Worker, Route],
        placed: Sequence[tuple[Ticket, Worker, Seat]],
        now: Nanoseconds,
    ) -> None:
        self._theta = board.adaptation.theta
        self._routes = routes
        self._placed = placed
        self._now = now
        self._new = {ticket.request for ticket, _, _ in placed}

    def __call__(self, worker: Worker, requests: Sequence[int]) -> bool:
        """Returns True if slots and b-e allow it."""
        route = self._routes[worker]
        there = sum(1 for _, at, _ in self._placed if at is worker)
        if route.running - there + len(requests) > route.capacity:
            return False
        seats = [self._placed[number][2] for number in requests]
        others = [seat for seat in worker.seats.values() if seat.request not in self._new]
        *jobs, last = (seat.job() for seat in [*others, *seats])
        limits = self._limits(worker, [*others, *seats])
        return examine(worker.lines, limits, jobs, last, _READINGS).ok

    def _limits(self, worker: Worker, seats: Sequence[Seat]) -> Limits:
        """Returns the tightest limits of these sessions, as of now."""
        due = min((seat.due_ns for seat in seats if seat.is_new and seat.due_ns), default=0)
        pace = min((seat.per_token_ns for seat in seats if seat.per_token_ns), default=0)
        return Limits(
            first_token_ns=max(1, due - self._now) if due else 0,
            per_token_ns=pace,
            cache_capacity=worker.limits.cache_capacity or math.inf,
            gamma=worker.limits.gamma,
            theta=self._theta,
        )
