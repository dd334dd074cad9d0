"""The cluster on which packing is tried: its chains, their agents, and all speeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from catenary_scheduler.dispatch.chained.packing_rules import PackingRules
from catenary_services.domain.ids import (
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    PlanId,
    SessionId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.plan import CacheCapacity, Chain, ChainHop, ModelPlan, Plan

MS = 10**6
S = 10**9
MODEL = ModelKey("packed", "1")
FAR = 1 << 60


@dataclass(frozen=True)
class Setup:
    """The settings of a cluster to try packing on."""

    chains: int = 4
    goal: PackingGoal = "pack"
    checked: bool = False
    """True if all invariants are checked after every event, which takes time."""
    slots: int = 16
    cache_tokens: int = 16_000
    """Cache of each chain in tokens; 0 if slots are the only limit."""
    policy: str = "slo"
    lines: LatencyLines | None = None
    objectives: TokenObjectives | None = None
    token_ns: Nanoseconds = 25 * MS
    move_ns: Nanoseconds = 50 * MS
    fails: Callable[[SessionId], bool] = lambda session: False
    """Returns True if a move to this session fails."""
    rules: PackingRules = field(default_factory=PackingRules)
    classes: Sequence[str] = ()
    """Device classes of the agents, one by one; all alike if left out."""
    capacities: Sequence[int] = ()
    """Cache of each chain in tokens, where they differ."""
    shared: Sequence[Sequence[int]] = ()
    """Agents of each chain, where chains have several or share some."""
    link_bytes_per_second: int = 10**9
    cache_bytes_per_token: int = 4096


def chains_of(setup: Setup) -> list[Chain]:
    found = []
    for number in range(setup.chains):
        agents = setup.shared[number] if setup.shared else (number,)
        size = 12 // len(agents)
        hops = tuple(
            ChainHop(
                AgentId(f"a{agent:02}"),
                PartitionKey(MODEL, at * size, (at + 1) * size),
                at * size,
                (at + 1) * size,
            )
            for at, agent in enumerate(agents)
        )
        tokens = setup.capacities[number] if setup.capacities else setup.cache_tokens
        found.append(
            Chain(
                f"c{number:02}",
                hops,
                setup.slots,
                10**9,
                lines=setup.lines,
                cache_tokens=float(tokens),
            )
        )
    return found


def plan_of(setup: Setup, chains: Sequence[Chain], goal: PackingGoal) -> Plan:
    """Returns the plan that serves the model by these chains, with a packing goal."""
    slots: dict[tuple[AgentId, PartitionKey], int] = {}
    for chain in chains:
        for hop in chain.hops:
            key = (hop.agent, hop.partition)
            slots[key] = slots.get(key, 0) + chain.capacity * hop.blocks
    caches = tuple(CacheCapacity(*key, count) for key, count in slots.items())
    model = ModelPlan(
        MODEL,
        FAR,
        (),
        chains=tuple(chains),
        caches=caches,
        session_tokens=4096,
        objectives=setup.objectives,
        packing=goal,
    )
    return Plan(PlanId(goal), (model,))
