"""Outcome of a search in sentences: the choice, what the others would give, and who is idle."""

from __future__ import annotations

from catenary_scheduler.planning.search.options import PlanAnswer, PlanOption, ServingFigures
from catenary_scheduler.planning.search.search import ChainSearch, PricedShape, why_not
from catenary_services.domain.decoder import serves_whole
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    AgentId,
)


def in_words(search: ChainSearch) -> list[str]:
    """Returns sentences on the choice and on all that was considered besides."""
    key = search.job.load.deployed.key
    return [f"{key}: {line}" for line in (*_choice(search), *_others(search))]


def answer_of(search: ChainSearch, notes: tuple[str, ...] = ()) -> PlanAnswer:
    """Returns the outcome as an answer to a question."""
    priced = (search.chosen, *search.others)
    options = [
        PlanOption(
            each.shape.name,
            each.shape.placement,
            each.figures,
            "" if each is search.chosen else why_not(search, each),
        )
        for each in priced
    ]
    options += [
        PlanOption(name, each.shape.placement, each.figures, f"it is the same as {each.shape.name}")
        for each in priced
        for name in each.shape.also
    ]
    options += [PlanOption(each.name, None, None, each.problem) for each in search.impossible]
    return PlanAnswer(search.job.load.deployed.key, tuple(options), idle_reasons(search), notes)


def idle_reasons(search: ChainSearch) -> dict[AgentId, str]:
    """Returns why an agent hosts nothing of the model, by agent; for each that hosts nothing."""
    used = search.chosen.shape.agents
    left_out = {
        agent: f"it cannot load {search.job.load.deployed.key}: {why}"
        for why, agents in search.job.left_out.items()
        for agent in agents
    }
    unused = {
        agent: _why_idle(search, name)
        for name in sorted(search.job.memories)
        if (agent := AgentId(name)) not in used
    }
    return {**unused, **left_out}


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
        f"{chosen.shape.name}{why} would give {said(chosen.figures)}; more is limited by"
        f" {chosen.figures.limit}.",
        f"{chosen.figures.attainment:.0%} of {_number(load.rate_per_s)} sessions/s are predicted to"
        " be within the objectives."
        if load.deployed.objectives is not None
        else f"{chosen.figures.attainment:.0%} of {_number(load.rate_per_s)} sessions/s are"
        " predicted to be served without waiting.",
    ]


def _others(search: ChainSearch) -> list[str]:
    lines = [
        f"instead, {other.shape.name} would give {said(other.figures)}; {why_not(search, other)}."
        for other in search.others
        if other.figures is not None
    ]
    lines += [
        f"{name}: the same as {each.shape.name}."
        for each in (search.chosen, *search.others)
        for name in each.shape.also
    ]
    key = search.job.load.deployed.key
    return [
        *lines,
        *(
            f"{each.name}: not possible, {each.problem.removeprefix(f'{key}: ')}."
            for each in search.impossible
        ),
    ]


def _why_idle(search: ChainSearch, name: str) -> str:
    key = search.job.load.deployed.key
    if too_small := _too_small(search, name):
        return f"of {key}, {too_small}"
    with_it = [
        other
        for other in search.others
        if AgentId(name) in other.shape.agents and other.figures is not None
    ]
    chosen = search.chosen.figures
    if not with_it or chosen is None:
        return f"no chain of {key} that was found leads through it"
    best = with_it[0]
    assert best.figures is not None
    return (
        f"with it, {best.shape.name} of {key} would give {_against(best, chosen)};"
        f" {why_not(search, best)}"
    )


def _too_small(search: ChainSearch, name: str) -> str:
    room, most = search.job.memories[name], search.job.load.deployed.session_tokens
    blocks = len(room.held.block_bytes) if serves_whole(room.agent.runtime) else 1
    needed = blocks * (room.held.largest_block_bytes + room.held.slot_bytes(most))
    if room.memory is None or room.memory >= needed:
        return ""
    what = "the whole model" if blocks > 1 else "one block"
    return (
        f"{what} with the cache of a session takes {needed:,} bytes beside the ends of the model"
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
