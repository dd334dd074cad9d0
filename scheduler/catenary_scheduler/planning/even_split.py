"""Even split: pipelines from block times alone, with balanced partitions and agents in proportion.

The memory and the speed of the agents are ignored. `replicas` uses this split for models that are
too large for one agent, or whose deployment asks for partitions.
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
from catenary_services.domain.decoder import (
    AllocatedSizes,
    DecoderRuntime,
    DecoderTable,
    why_not_loaded,
)
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.model import BlockTable
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible

MOST_PARTITIONS = 3
"""Length of the longest pipeline that is made by default (PPipe's optimum has two or three
partitions)."""


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A model that is to be served, and the settings of its deployment."""

    key: ModelKey
    table: BlockTable
    slo_ns: Nanoseconds
    max_batch: int
    float16_boundaries: bool
    partitions: int | None = None
    """Length of its pipeline; None for min(agents, blocks, 3). For a model that generates text it
    is the length of every chain, and None leaves that to the planner."""
    decoder: DecoderTable | None = None
    """Decoder table of a model that generates text; None for other models."""
    session_tokens: int = 0
    """Largest number of tokens of one session of a model that generates text."""
    objectives: TokenObjectives | None = None
    """Objectives of sessions that name none of their own, for a model that generates text."""
    cache_oversubscription: float | None = None
    """Slots per session of full length that fits into memory, for a model that generates text. None
    stands for the cluster's setting."""
    packing: PackingGoal = "off"
    """Goal for which the sessions of a model that generates text are moved."""
    block_bytes: tuple[int, ...] = ()
    """Bytes of each block's weights; empty if they are unknown."""
    precision: str = "fp32"
    """Precision in which CPU agents keep the weights of a model that generates text."""
    target: str = "both"
    """Devices for which a model that generates text was imported: "cpu", "gpu" or "both"."""
    engines: frozenset[DecoderRuntime] = frozenset()
    """Engines that can read the files of a model that generates text."""
    has_blocks: bool = True
    """False for a model that only an engine serves."""

    def held_by(self, agent: Agent) -> AllocatedSizes:
        """Returns the sizes that a model that generates text has on an agent.

        Raises:
            PlanInfeasible: The model does not generate text.
        """
        if self.decoder is None:
            raise PlanInfeasible(f"{self.key} does not generate text")
        return self.decoder.held_by(agent.runtime, self.precision)

    def why_not_loaded(self, agent: Agent) -> str:
        """Returns why an agent cannot load it, whatever it tries; empty if it may."""
        if self.decoder is None:
            return ""
        return why_not_loaded(agent.runtime, self.target, self.engines, has_blocks=self.has_blocks)


def even_split(models: Sequence[DeployedModel], agents: Sequence[Agent]) -> Placement:
    """Returns a placement with one pipeline per model over all agents.

    Every model uses every agent, and they share the agents in time. A partition gets agents in
    proportion to its compute time. With fewer agents than partitions, agents host several
    partitions.

    Raises:
        PlanInfeasible: There is no agent, or a model has no blocks.
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
        # Each model starts at another agent, so that not all first partitions are on the same one.
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
    """Cuts `times` into `parts` non-empty contiguous ranges with the least possible largest sum.

    The result is exact: it is the classic dynamic programme over (ranges, blocks).
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
    """Returns the pool of each partition."""
    if len(agents) < len(weights):
        return [[agent] for agent in _pack(weights, agents)]
    # Each partition gets one agent. The others go one by one to the partition with the most time
    # per agent, which makes the slowest pool as fast as possible.
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
    """Returns the agent of each partition.

    Neighbouring partitions share an agent, which saves a transfer.
    """
    hosts: list[AgentId] = [agents[0]] * len(weights)
    ranges = balanced_ranges(weights, len(agents))
    for agent, (first, last) in zip(agents, ranges, strict=True):
        hosts[first:last] = [agent] * (last - first)
    return hosts
