"""Composed chains in the form of a plan, as the dispatcher is given it."""

from __future__ import annotations

from catenary_scheduler.planning.chains.problem import ComposedChain, Composition, HostedBlocks
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    PlanId,
)
from catenary_services.domain.plan import CacheCapacity, Chain, ChainHop, ModelPlan, Plan

_NEVER: Nanoseconds = 1 << 62
_SESSION_TOKENS = 1 << 30
"""Tokens of the longest session: without a limit in effect, because slots count sessions only."""


def plan_of(composition: Composition, model: ModelKey) -> Plan:
    """Returns the plan that serves a model by composed chains; agents have the servers' names."""
    parts = {
        each.server: PartitionKey(model, each.first_block, each.last_block)
        for each in composition.hosted
    }
    caches = tuple(_cache(each, parts[each.server]) for each in composition.hosted)
    chains = tuple(
        _chain(f"chain-{number}", chain, parts) for number, chain in enumerate(composition.chains)
    )
    served = ModelPlan(
        model, _NEVER, (), chains=chains, caches=caches, session_tokens=_SESSION_TOKENS
    )
    return Plan(PlanId("simulated"), (served,))


def _chain(name: str, chain: ComposedChain, parts: dict[str, PartitionKey]) -> Chain:
    hops = tuple(
        ChainHop(AgentId(hop.server), parts[hop.server], hop.first_block, hop.last_block)
        for hop in chain.hops
    )
    return Chain(name, hops, chain.capacity, round(chain.service_s * NANOSECONDS_PER_SECOND))


def _cache(hosted: HostedBlocks, part: PartitionKey) -> CacheCapacity:
    return CacheCapacity(AgentId(hosted.server), part, hosted.slots)
