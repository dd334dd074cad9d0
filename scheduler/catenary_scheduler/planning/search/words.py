"""Outcome of a search in sentences: the choice, what the others would give, and who is idle."""

from __future__ import annotations

from catenary_scheduler.planning.search.figures import ServingFigures
from catenary_scheduler.planning.search.search import ChainSearch, PricedShape
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

MOST_OTHERS = 6
"""Largest number of other shapes that are told of."""


def in_words(search: ChainSearch) -> list[str]:
    """Returns sentences on the choice, on the others and on every idle agent."""
    key = search.job.load.deployed.key
    lines = [f"{key}: {line}" for line in (*_choice(search), *others_in_words(search))]
    return [*lines, *(f"{key}: {line}" for line in idle_in_words(search).values())]


def others_in_words(search: ChainSearch) -> list[str]:
    """Returns a sentence on each of the best other shapes: what it would give."""
    return [
        f"instead, {other.shape.name} would give {said(other.figures)}."
        for other in search.others[:MOST_OTHERS]
        if other.figures is not None
    ]


def idle_in_words(search: ChainSearch) -> dict[str, str]:
    """Returns a sentence on every agent that could load the model and hosts none of it."""
    used = search.chosen.shape.agents
    return {
        name: _why_idle(search, name)
        for name in sorted(search.job.memories)
        if name not in {str(agent) for agent in used}
    }


def said(figures: ServingFigures) -> str:
    """Returns figures in words, without a full stop."""
    return (
        f"{_number(figures.rate_per_s)} sessions/s ({_number(figures.tokens_per_s)} tokens/s), the"
        f" first token after {_time(figures.first_token_ns)} and each further one after"
        f" {_time(figures.per_token_ns)}, with {figures.gpus} GPU(s) and {figures.sessions}"
        " session(s) at a time"
    )


def _choice(search: ChainSearch) -> list[str]:
    chosen, load = search.chosen, search.job.load
    if chosen.figures is None:
        return ["nothing is measured yet, so chains go by guesses of their times."]
    why = ", as asked for," if chosen.shape.asked_for else ""
    return [
        f"{chosen.shape.name}{why} are predicted to give {said(chosen.figures)}; more is limited by"
        f" {chosen.figures.limit}.",
        f"{chosen.figures.attainment:.0%} of {_number(load.rate_per_s)} sessions/s are predicted to"
        " be within the objectives."
        if load.deployed.objectives is not None
        else f"{chosen.figures.attainment:.0%} of {_number(load.rate_per_s)} sessions/s are"
        " predicted to be served without waiting.",
    ]


def _why_idle(search: ChainSearch, name: str) -> str:
    if too_small := _too_small(search, name):
        return f"{name} is idle: {too_small}."
    with_it = [
        other
        for other in search.others
        if any(str(agent) == name for agent in other.shape.agents) and other.figures is not None
    ]
    chosen = search.chosen.figures
    if not with_it or chosen is None:
        return f"{name} is idle: no chain that was found leads through it."
    best = with_it[0]
    assert best.figures is not None
    return f"{name} is idle: with it, {best.shape.name} would give {_against(best, chosen)}."


def _too_small(search: ChainSearch, name: str) -> str:
    room, most = search.job.memories[name], search.job.load.deployed.session_tokens
    needed = room.held.largest_block_bytes + room.held.slot_bytes(most)
    if room.memory is None or room.memory >= needed:
        return ""
    return (
        f"one block with the cache of a session takes {needed:,} bytes beside the ends of the model"
        f" and a step, and {max(0, int(room.memory)):,} are left; with"
        f" {needed - int(room.memory):,} bytes more it could be used"
    )


def _against(other: PricedShape, chosen: ServingFigures) -> str:
    assert other.figures is not None
    figures = other.figures
    return (
        f"{_number(figures.rate_per_s)} sessions/s where {_number(chosen.rate_per_s)} are given"
        f" without it, and a session would take {_time(figures.response_ns)} where it takes"
        f" {_time(chosen.response_ns)}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(nanoseconds: float) -> str:
    if nanoseconds >= 10 * NANOSECONDS_PER_SECOND:
        return f"{nanoseconds / NANOSECONDS_PER_SECOND:.1f} s"
    return f"{nanoseconds / NANOSECONDS_PER_MILLISECOND:.3g} ms"
