"""Times of steps on each agent of a chain, for the share of its device that the book reserves."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.book.steps import StepLine
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import ChainHop, Plan


def take_step_lines(plan: Plan, slots: SlotLedger) -> None:
    """Gives the caches of a plan the times of their steps; all others have none from now on."""
    found: dict[Cache, StepLine] = {}
    for model in plan.models:
        for chain in model.chains:
            if chain.lines is not None:
                _add(found, chain.hops, chain.lines, slots, chain.role == "prefill")
    for cache in slots.caches():
        slots.take_line(cache, found.get(cache))


def refit_step_lines(
    fitted: Iterable[tuple[tuple[ChainHop, ...], LatencyLines]], slots: SlotLedger
) -> None:
    """Gives the caches along chains the times that were fitted anew."""
    found: dict[Cache, StepLine] = {}
    for hops, lines in fitted:
        _add(found, hops, lines, slots, is_prefill=False)
    for cache, line in found.items():
        # A chain that only runs prompts keeps its lines: nothing tells its role here.
        if cache.steps is not None and cache.steps.line is not None and cache.steps.line.most:
            slots.take_line(cache, line)


def _add(
    found: dict[Cache, StepLine],
    hops: tuple[ChainHop, ...],
    lines: LatencyLines,
    slots: SlotLedger,
    is_prefill: bool,
) -> None:
    """Adds the lines of a chain's agents.

    Of chains that meet at an agent, the one that asks for the most of it counts.
    """
    blocks = sum(hop.blocks for hop in hops)
    shares = lines.hop_shares or tuple([hop.blocks / blocks for hop in hops])
    longest = max(shares)
    for hop, share in zip(hops, shares, strict=True):
        cache = slots.cache(hop.agent, hop.partition)
        known = found.get(cache)
        # A session that enters late computes less; the whole partition is what a step takes.
        whole = share * (hop.partition.last_block - hop.partition.first_block) / hop.blocks
        line = StepLine(
            hop.partition.last_block - hop.partition.first_block,
            0.0 if is_prefill else whole * lines.decode_ns,
            0.0 if is_prefill else whole * lines.decode_session_ns,
            0.0 if is_prefill else whole * lines.decode_context_token_ns,
            0.0 if is_prefill else whole * lines.decode_lone_ns,
            whole * lines.prefill_ns,
            whole * lines.prefill_token_ns,
            lines.prefill_chunk_tokens,
            share,
            0.0 if is_prefill else share / longest,
        )
        if known is None or line.share > known.share:
            found[cache] = line
