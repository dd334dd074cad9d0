"""Where a session goes that is to move wherever is best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from catenary_scheduler.dispatch.chained.placement.seating import UNKNOWN
from catenary_scheduler.dispatch.chained.queues.desk import ModelQueue
from catenary_scheduler.dispatch.chained.routes import ChainState
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.packing.transfers.transfer_costs import ChainActivity


def best_route(
    desk: ModelQueue, ticket: SequenceRequest, routes: Sequence[ChainState]
) -> ChainState | None:
    """Returns the best of the chains that have a slot for a session.

    Chains on which nobody misses an objective by it come first (constraint b of placement, and e);
    then those whose caches hold it to its expected end (e). Where neither is, it stays. Of these
    the least loaded one, or the fullest where the model is packed.
    """
    # Who only runs prompts generates where nobody else can.
    able = [route for route in routes if route.role != "prefill"] or list(routes)
    fitting = [(rank, route) for route in able if (rank := _rank(desk, ticket, route)) is not None]
    sign = -1.0 if desk.packing == "pack" else 1.0

    def key(entry: tuple[int, ChainState]) -> tuple[int, float, int, int]:
        rank, route = entry
        share = route.jobs / max(1, route.capacity)
        return (rank, sign * share, route.service_ns, route.index)

    best = min(fitting, key=key, default=None)
    return best[1] if best is not None else None


def _rank(desk: ModelQueue, ticket: SequenceRequest, route: ChainState) -> int | None:
    """Returns 0 if b and e hold with a session more, 1 if e does; None if neither."""
    board = desk.board
    held = board.seat_of(ticket.request) if board is not None else None
    if board is None or held is None:
        return 0
    seat, worker = held[1], board.worker_of(route)
    if worker.lines is UNKNOWN:
        return 0
    cached = seat.prompt_tokens + seat.generated_tokens
    left = max(1.0, seat.final_tokens - seat.generated_tokens)
    if not worker.has_cache(cached, left):
        return None
    theta = board.adaptation.theta
    return 0 if worker.has_context(cached, left, seat.per_token_ns, theta) else 1


def load_of(desk: ModelQueue, route: ChainState) -> ChainActivity:
    """Returns what a chain computes at the moment, as far as is known."""
    board = desk.board
    worker = board.worker_of(route) if board is not None else None
    if worker is None or worker.lines is UNKNOWN:
        return ChainActivity(None)
    pace = 0 if worker.tightest_ns == math.inf else int(worker.tightest_ns)
    mine = {hop.agent for hop in route.hops}
    sharing = sum(not mine.isdisjoint([hop.agent for hop in r.hops]) for r in desk.offered)
    return ChainActivity(worker.lines, len(worker.seats), worker.now_tokens, pace, max(1, sharing))
