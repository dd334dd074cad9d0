"""Figures of chains: what they sustain, and what a session sees of it, by their latency lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from catenary_scheduler.planning.chain_placement import ChainPlacement
from catenary_scheduler.planning.latency.steady_state import ChainWork, chain_work, shared_rates
from catenary_scheduler.planning.live.chains import ChainLoad
from catenary_scheduler.planning.placement import ModelPlacement
from catenary_scheduler.planning.search.options import ServingFigures
from catenary_scheduler.planning.survival import agents_of, survives_any_agent
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, PartitionKey
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import ChainHop, ChainRole

LinesOf = Callable[[Sequence[ChainHop]], LatencyLines | None]
"""Returns the latency lines of a chain; None if nothing was measured."""


def figures_of(
    model: ModelPlacement, load: ChainLoad, lines_of: LinesOf, handover_ns: float = 0.0
) -> ServingFigures | None:
    """Returns the figures of chains; None if nothing is known about one of them.

    The load is shared in proportion to what each chain sustains. Chains that run prompts for others
    and those that generate for them each get all of it.

    Args:
        model: The placement of one model in chains.
        load: Its deployment, with the load that is asked for.
        lines_of: Returns the latency lines of a chain.
        handover_ns: Mean time for which a session's caches travel from a chain that runs prompts to
            one that generates.
    """
    lengths = (load.shape.prompt_tokens, load.shape.output_tokens)
    works: dict[ChainRole, list[ChainWork]] = {}
    in_time = []
    for chain in model.chains:
        lines = lines_of(hops_of(load.deployed.key, chain))
        if lines is None:
            return None
        work = chain_work(lines, chain.role, lengths, _slots(chain, sum(lengths)))
        if chain.role == "decode":
            work = work.waiting(handover_ns)
        works.setdefault(chain.role, []).append(work)
        if work.sustained(load.deployed.objectives)[0]:
            in_time.append(chain)
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
        sessions=sum(chain.capacity for chain in model.chains if chain.role != "prefill"),
        rate_per_s=rate_per_s,
        tokens_per_s=rate_per_s * load.shape.output_tokens,
        first_token_ns=first_ns,
        per_token_ns=token_ns,
        response_ns=first_ns + steps * token_ns,
        attainment=attainment_of(rate_per_s, load.rate_per_s),
        gpus=len(agents_of(model)),
        survives=survives_any_agent(replace(model, chains=tuple(in_time))),
        limit=slowest.limit,
    )


def attainment_of(rate_per_s: float, load_per_s: float) -> float:
    """Returns the share of a load that is served; of no load, all or nothing."""
    return min(1.0, rate_per_s / load_per_s) if load_per_s > 0.0 else float(rate_per_s > 0.0)


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
    limit: str
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
        return math.fsum(t * w for t, w in zip(times, sustained, strict=True) if w) / weight

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
