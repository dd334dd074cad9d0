"""Chooses the best chain for a session that moves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.workers import UNKNOWN
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.packing.transfers.transfer_costs import ChainActivity


def best_route(
    model_queue: ModelQueue, sequence: SequenceRequest, routes: Sequence[ChainState]
) -> ChainState | None:
    """Returns the best of the chains that have a slot for a session; None if none will do.

    Chains on which no session misses its objective because of it come first (constraint b of
    placement, and e), then those whose caches hold it to its expected end (e). If there are
    neither, it stays. Among equals the least loaded chain is taken, or the fullest if the model is
    packed.
    """
    # A chain that only runs prompts generates if no other chain can.
    able = [route for route in routes if route.role != "prefill"] or list(routes)
    fitting = [
        (rank, route) for route in able if (rank := _rank(model_queue, sequence, route)) is not None
    ]
    sign = -1.0 if model_queue.packing == "pack" else 1.0

    def key(entry: tuple[int, ChainState]) -> tuple[int, float, int, int]:
        rank, route = entry
        share = route.jobs / max(1, route.capacity)
        return (rank, sign * share, route.service_ns, route.index)

    best = min(fitting, key=key, default=None)
    return best[1] if best is not None else None


def _rank(model_queue: ModelQueue, sequence: SequenceRequest, route: ChainState) -> int | None:
    """Returns 0 if b and e hold with one more session, 1 if only e does; None if neither."""
    placer = model_queue.placer
    held = placer.loads.running_of(sequence.request) if placer is not None else None
    if placer is None or held is None:
        return 0
    running, worker = held[1], placer.workers.of(route)
    if worker.lines is UNKNOWN:
        return 0
    cached = running.prompt_tokens + running.generated_tokens
    left = max(1.0, running.final_tokens - running.generated_tokens)
    if not worker.has_cache(cached, left):
        return None
    theta = placer.adaptation.theta
    return 0 if worker.has_context(cached, left, running.per_token_ns, theta) else 1


def load_of(model_queue: ModelQueue, route: ChainState) -> ChainActivity:
    """Returns the present work of a chain, as far as is known."""
    placer = model_queue.placer
    worker = placer.workers.of(route) if placer is not None else None
    if worker is None or worker.lines is UNKNOWN:
        return ChainActivity(None)
    pace = 0 if worker.tightest_ns == math.inf else int(worker.tightest_ns)
    mine = {hop.agent for hop in route.hops}
    sharing = sum(not mine.isdisjoint([hop.agent for hop in r.hops]) for r in model_queue.offered)
    return ChainActivity(
        worker.lines, len(worker.running_sequences), worker.now_tokens, pace, max(1, sharing)
    )
