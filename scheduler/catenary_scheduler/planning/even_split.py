"""A pipeline from block times alone: balanced partitions, agents in proportion.

Nothing is assumed of the agents but that they exist: their memory and speed are not looked at.
`replicas` cuts models by it that are too large for one agent, or are to be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from catenary_scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
)
from catenary_services.domain.decoder import AllocatedSizes, DecoderTable, why_not_loaded
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.model import BlockTable
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible

MOST_PARTITIONS = 3
"""Longest pipeline made by default (PPipe's optimum has two or three)."""


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A model to be served, and how."""

    key: ModelKey
    table: BlockTable
    slo_ns: Nanoseconds
    max_batch: int
    float16_boundaries: bool
    partitions: int | None = None
    """Length of its pipeline; None for min(agents, blocks, 3). Of a model that generates text: of
    every chain; None leaves it to the planner."""
    decoder: DecoderTable | None = None
    """Set for a model that generates text."""
    session_tokens: int = 0
    """Of such a model: most tokens of one session."""
    objectives: TokenObjectives | None = None
    """Of such a model: what sessions are held to that name no objectives."""
    cache_oversubscription: float | None = None
    """Of such a model: slots per session of full length that fits; None: as the cluster."""
    packing: PackingGoal = "off"
    """Of such a model: what its sessions are moved for."""
    block_bytes: tuple[int, ...] = ()
    """Memory of each block's weights; empty if that is not known."""
    precision: str = "fp32"
    """Of such a model that generates text: what CPU agents keep its weights in."""
    target: str = "both"
    """Of such a model: what it was imported for, "cpu", "gpu" or "both"."""

    def held_by(self, agent: Agent) -> AllocatedSizes:
        """Returns the sizes of a model that generates text where an agent holds it.

        Raises:
            PlanInfeasible: If it does not generate text.
        """
        if self.decoder is None:
            raise PlanInfeasible(f"{self.key} does not generate text")
        return self.decoder.held_by(agent.runtime, self.precision)

    def why_not_loaded(self, agent: Agent) -> str:
        """Returns why an agent cannot load it, whatever it tries; empty if it may."""
        if self.decoder is None:
            return ""
        return why_not_loaded(agent.runtime, self.target)


def even_split(models: Sequence[DeployedModel], agents: Sequence[Agent]) -> Placement:
    """Returns a placement with one pipeline per model over all agents.

    Every agent is used by every model (models share them in time); a partition gets agents in
    proportion to its time. With fewer agents than partitions, agents host several.

    Raises:
        PlanInfeasible: If there is no agent, or a model has no blocks.
    """
    names = sorted(agent.agent_id for agent in agents)
    if not names:
        raise PlanInfeasible("no agent is there to place a model on")
    placements = []
    for number, model in enumerate(models):
        blocks = model.table.blocks
        if blocks < 1:
            raise PlanInfeasible(f"{model.key} has no blocks")
        wanted = model.partitions or min(len(names), MOST_PARTITIONS)
        ranges = balanced_ranges(model.table.compute_ns, min(wanted, blocks))
        weights = [sum(model.table.compute_ns[first:last]) for first, last in ranges]
        # Each model starts at another agent, so that not all first partitions meet on one.
        shift = number % len(names)
        pools = _spread(weights, names[shift:] + names[:shift])
        stages = tuple(
            StagePlacement(first, last, tuple(sorted(pool)))
            for (first, last), pool in zip(ranges, pools, strict=True)
        )
        batch = model.max_batch if model.table.batched else 1
        placements.append(
            ModelPlacement(
                model.key,
                model.slo_ns,
                model.float16_boundaries,
                (PipelinePlacement(max(1, batch), stages),),
            )
        )
    return Placement(tuple(placements))


def balanced_ranges(times: Sequence[Nanoseconds], parts: int) -> list[tuple[int, int]]:
    """Cuts `times` into `parts` non-empty contiguous ranges with the smallest largest sum.

    The classic dynamic programme over (ranges, blocks); exact.
    """
    count = len(times)
    before = [0]
    for time in times:
        before.append(before[-1] + time)
    worst = before[:]
    cuts: list[list[int]] = []
    for part in range(2, parts + 1):
        row, cut = [0] * (count + 1), [0] * (count + 1)
        for end in range(part, count + 1):
            row[end], cut[end] = min(
                (max(worst[at], before[end] - before[at]), at) for at in range(part - 1, end)
            )
        worst = row
        cuts.append(cut)
    ranges = []
    end = count
    for cut in reversed(cuts):
        ranges.append((cut[end], end))
        end = cut[end]
    return [(0, end), *reversed(ranges)]


def _spread(weights: Sequence[Nanoseconds], agents: Sequence[AgentId]) -> list[list[AgentId]]:
    """Gives each partition its pool."""
    if len(agents) < len(weights):
        return [[agent] for agent in _pack(weights, agents)]
    # One each, then one after another to the partition with most time per agent: the division
    # that makes the slowest pool as fast as possible.
    sizes = [1] * len(weights)
    heap = [(-float(weight), at) for at, weight in enumerate(weights)]
    heapify(heap)
    for _ in range(len(agents) - len(weights)):
        at = heap[0][1]
        sizes[at] += 1
        heapreplace(heap, (-weights[at] / sizes[at], at))
    pools, first = [], 0
    for size in sizes:
        pools.append(list(agents[first : first + size]))
        first += size
    return pools


def _pack(weights: Sequence[Nanoseconds], agents: Sequence[AgentId]) -> list[AgentId]:
    """Gives neighbouring partitions to the same agent (no transfer between them)."""
    hosts: list[AgentId] = [agents[0]] * len(weights)
    ranges = balanced_ranges(weights, len(agents))
    for agent, (first, last) in zip(agents, ranges, strict=True):
        hosts[first:last] = [agent] * (last - first)
    return hosts
