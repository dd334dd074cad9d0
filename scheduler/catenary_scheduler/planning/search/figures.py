"""Figures of chains: what they sustain, and what a session sees of it, by their latency lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from catenary_scheduler.planning.chain_placement import ChainPlacement
from catenary_scheduler.planning.latency.steady_state import (
    ChainWork,
    LoadLimit,
    chain_work,
    shared_rates,
)
from catenary_scheduler.planning.live.chains import ChainLoad
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, PartitionKey
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import ChainHop, ChainRole

LinesOf = Callable[[Sequence[ChainHop]], LatencyLines | None]
"""Returns the latency lines of a chain; None if nothing was measured."""


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """The service that chains give at the load they were asked for, and at most.

    Attributes:
        sessions: Sessions at a time that their caches hold.
        rate_per_s: Sessions per second that they sustain within the objectives.
        tokens_per_s: Tokens per second at that rate.
        first_token_ns: Mean time to the first token at the load asked for, or at the sustained rate
            if that is less.
        per_token_ns: Mean time of each further token, likewise.
        response_ns: Mean time of a whole session, likewise.
        attainment: Share of the load that they serve within the objectives.
        gpus: Number of agents that they take.
        limit: What keeps them from sustaining more.
    """

    sessions: int
    rate_per_s: float
    tokens_per_s: float
    first_token_ns: float
    per_token_ns: float
    response_ns: float
    attainment: float
    gpus: int
    limit: LoadLimit


def figures_of(
    chains: Sequence[ChainPlacement], load: ChainLoad, lines_of: LinesOf
) -> ServingFigures | None:
    """Returns the figures of chains; None if nothing is known about one of them.

    The load is shared in proportion to what each chain sustains. Chains that run prompts for others
    and those that generate for them each get all of it.

    Args:
        chains: The chains of one model.
        load: Its deployment, with the load that is asked for.
        lines_of: Returns the latency lines of a chain.
    """
    works: dict[ChainRole, list[ChainWork]] = {}
    for chain in chains:
        lines = lines_of(hops_of(load.deployed.key, chain))
        if lines is None:
            return None
        lengths = (load.shape.prompt_tokens, load.shape.output_tokens)
        works.setdefault(chain.role, []).append(
            chain_work(lines, chain.role, lengths, _slots(chain, sum(lengths)))
        )
    gpus = len({hop.agent for chain in chains for hop in chain.hops})
    if not works:
        return None
    groups = [
        _group(works[role], load.deployed.objectives, load.rate_per_s) for role in sorted(works)
    ]
    slowest = min(groups, key=lambda group: group.rate)
    rate_per_s = slowest.rate * NANOSECONDS_PER_SECOND
    first_ns = max(group.first_token_ns for group in groups)
    token_ns = max(group.per_token_ns for group in groups)
    steps = max(0.0, load.shape.output_tokens - 1.0)
    return ServingFigures(
        sessions=sum(chain.capacity for chain in chains if chain.role != "prefill"),
        rate_per_s=rate_per_s,
        tokens_per_s=rate_per_s * load.shape.output_tokens,
        first_token_ns=first_ns,
        per_token_ns=token_ns,
        response_ns=first_ns + steps * token_ns,
        attainment=min(1.0, rate_per_s / load.rate_per_s),
        gpus=gpus,
        limit=slowest.limit,
    )


def hops_of(model: ModelKey, chain: ChainPlacement) -> list[ChainHop]:
    """Returns the hops of a chain as plans have them."""
    return [
        ChainHop(
            hop.agent,
            PartitionKey(model, hop.first_block, hop.last_block),
            hop.entry,
            hop.last_block,
        )
        for hop in chain.hops
    ]


@dataclass(frozen=True, slots=True)
class _Group:
    """Chains of one role, together."""

    rate: float
    limit: LoadLimit
    first_token_ns: float
    per_token_ns: float


def _group(
    works: Sequence[ChainWork], objectives: TokenObjectives | None, load_per_s: float
) -> _Group:
    found = [work.sustained(objectives) for work in works]
    sustained = [rate for rate, _ in found]
    load = load_per_s / NANOSECONDS_PER_SECOND
    whole = math.fsum(sustained)
    if not whole:
        # Nobody meets the objectives, so the times are those of sessions that are alone.
        sustained = [1.0] * len(works)
        rates = [0.0] * len(works)
    else:
        rates = shared_rates(sustained, load)
    weight = math.fsum(sustained)

    def mean(times: list[float]) -> float:
        return math.fsum(t * w for t, w in zip(times, sustained, strict=True)) / weight

    binding = max(zip(sustained, found, strict=True), key=lambda each: each[0])[1][1]
    return _Group(
        whole,
        binding,
        mean([work.first_token_ns(rate) for work, rate in zip(works, rates, strict=True)]),
        mean([work.per_token_ns(rate) for work, rate in zip(works, rates, strict=True)]),
    )


def _slots(chain: ChainPlacement, tokens: float) -> float:
    """Returns the sessions of mean length that a chain holds at a time."""
    if not chain.cache_tokens:
        return float(chain.capacity)
    return min(float(chain.capacity), chain.cache_tokens / max(1.0, tokens))
