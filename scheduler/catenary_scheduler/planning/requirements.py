"""Requirements of placements on agents (who must host what), and whether these are met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from catenary_scheduler.planning import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
    without_agents,
)
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from catenary_services.domain.plan import Chain, ModelPlan, Pipeline


@dataclass(frozen=True, slots=True)
class CacheRequirement:
    """Room for key-value caches that a range of decoder blocks must have."""

    block_slots: int
    session_tokens: int
    entry_blocks: tuple[int, ...]
    """Blocks at which chains enter, ascending. The first block of the partition is always one of
    them."""
    cache_tokens: int = 0
    """Number of tokens that memory must hold, counted once per block; 0 if every slot must have
    room at full length."""

    @property
    def tokens(self) -> int:
        """Number of tokens for which there must be memory, counted once per block."""
        return self.cache_tokens or self.block_slots * self.session_tokens

    def includes(self, other: CacheRequirement) -> bool:
        """Returns True if whoever meets this requirement also meets `other`."""
        return (
            self.block_slots >= other.block_slots
            and self.session_tokens >= other.session_tokens
            and self.tokens >= other.tokens
            and set(other.entry_blocks) <= set(self.entry_blocks)
        )

    def joined(self, other: CacheRequirement) -> CacheRequirement:
        """Returns the least requirement that includes both."""
        slots = max(self.block_slots, other.block_slots)
        most = max(self.session_tokens, other.session_tokens)
        tokens = max(self.tokens, other.tokens)
        entries = tuple(sorted({*self.entry_blocks, *other.entry_blocks}))
        return CacheRequirement(slots, most, entries, tokens if tokens < slots * most else 0)


class PartitionRequirement(NamedTuple):
    """Requirement on an agent for hosting one partition."""

    batch: int
    """The largest batch it must run; for decoder blocks the largest number of sessions at a
    time."""
    float16: bool
    """True if feature maps cross the boundaries of the partition as float16."""
    cache: CacheRequirement | None = None
    """Requirement on the caches of decoder blocks; None for other partitions."""


Requirements = dict[PartitionKey, PartitionRequirement]
"""Requirements on one agent, by the partitions that it must host."""


def joined(one: Requirements, other: Requirements) -> Requirements:
    """Returns requirements that serve both. Where they conflict, those of `other` hold."""
    both = {**one, **other}
    for key in one.keys() & other.keys():
        mine, theirs = one[key].cache, other[key].cache
        if mine is not None and theirs is not None:
            batch = max(one[key].batch, other[key].batch)
            both[key] = PartitionRequirement(batch, other[key].float16, mine.joined(theirs))
    return both


def agents_of(placement: Placement) -> set[AgentId]:
    """Returns every agent that a placement names."""
    named = {agent for _, _, stage in stages_of(placement) for agent in stage.agents}
    return named | {host.agent for model in placement.models for host in model.hosts}


def stages_of(
    placement: Placement,
) -> Iterator[tuple[ModelPlacement, PipelinePlacement, StagePlacement]]:
    """Yields every stage together with its model and pipeline."""
    for model in placement.models:
        for pipeline in model.pipelines:
            for stage in pipeline.stages:
                yield model, pipeline, stage


def pooled_parts(placement: Placement) -> set[tuple[AgentId, PartitionKey]]:
    """Returns which agents host which partitions for pipelines, each once."""
    return {
        (agent, partition_of(model, stage))
        for model, _, stage in stages_of(placement)
        for agent in stage.agents
    }


def partition_of(model: ModelPlacement, stage: StagePlacement) -> PartitionKey:
    return PartitionKey(model.model, stage.first_block, stage.last_block)


def required_by_agent(placement: Placement | None) -> dict[AgentId, Requirements]:
    """Returns the requirements on every agent of a placement; empty for None."""
    wanted: dict[AgentId, Requirements] = {}
    for model, pipeline, stage in stages_of(placement or Placement(())):
        key = partition_of(model, stage)
        for agent in stage.agents:
            mine = wanted.setdefault(agent, {})
            known = mine.get(key)
            batch = max(pipeline.batch_size, known.batch if known is not None else 0)
            mine[key] = PartitionRequirement(batch, model.float16_boundaries)
    for model in placement.models if placement is not None else ():
        for agent, key, need in hosts_of(model):
            wanted.setdefault(agent, {})[key] = need
    return wanted


def hosts_of(model: ModelPlacement) -> Iterator[tuple[AgentId, PartitionKey, PartitionRequirement]]:
    """Yields the hosts of a model that generates text: agent, partition and requirement."""
    entries: dict[tuple[AgentId, int, int], set[int]] = {}
    sessions: dict[tuple[AgentId, int, int], int] = {}
    for chain in model.chains:
        for hop in chain.hops:
            entries.setdefault(hop.host, {hop.first_block}).add(hop.entry)
            sessions[hop.host] = sessions.get(hop.host, 0) + chain.capacity
    for host in model.hosts:
        inside = tuple(sorted(entries.get(host.host, {host.first_block})))
        cache = CacheRequirement(host.block_slots, model.session_tokens, inside, host.cache_tokens)
        key = PartitionKey(model.model, host.first_block, host.last_block)
        yield host.agent, key, PartitionRequirement(sessions.get(host.host, 1), False, cache)


def without(placement: Placement, gone: set[AgentId]) -> Placement:
    """Returns a placement without the agents in `gone`.

    Pipelines and chains that need these are left out, and so are models of which nothing remains.
    """
    models = []
    for model in placement.models:
        pipelines = []
        for pipeline in model.pipelines:
            stages = tuple(
                replace(stage, agents=tuple(a for a in stage.agents if a not in gone))
                for stage in pipeline.stages
            )
            if all(stage.agents for stage in stages):
                pipelines.append(replace(pipeline, stages=stages))
        chains, hosts = without_agents(model.chains, model.hosts, gone)
        if pipelines or chains:
            models.append(replace(model, pipelines=tuple(pipelines), chains=chains, hosts=hosts))
    return replace(placement, models=tuple(models))


def needs_any(model: ModelPlacement, agents: Set[AgentId]) -> bool:
    """Returns True if a model is served less when `agents` do not load their parts.

    It may then not be served at all.
    """
    own = [pipeline for pipeline in model.pipelines if not pipeline.is_shared]
    if any(agents >= set(stage.agents) for pipeline in own for stage in pipeline.stages):
        return True
    return any(host.agent in agents for host in model.hosts)


def changing(old: Placement, new: Placement) -> frozenset[ModelKey]:
    """Returns the models that both placements serve, but in different ways."""
    before = {model.model: model for model in old.models}
    return frozenset(model.model for model in new.models if before.get(model.model, model) != model)


def only(placement: Placement, models: Iterable[ModelKey]) -> Placement:
    """Returns the part of a placement that concerns `models`."""
    wanted = set(models)
    return Placement(tuple(model for model in placement.models if model.model in wanted))


def can_go_back(old: Placement, new: Placement, is_present: Callable[[AgentId], bool]) -> bool:
    """Returns True if the present agents could serve every model of both plans by the old one."""
    gone = {agent for agent in agents_of(old) if not is_present(agent)}
    served = {model.model for model in without(old, gone).models}
    both = {model.model for model in old.models} & {model.model for model in new.models}
    return both <= served


Hosts = Callable[[AgentId, PartitionKey, PartitionRequirement], bool]
"""Returns True if an agent is present and hosts a partition as required."""


def missing(
    placement: Placement, hosts: Hosts, excused: Callable[[AgentId], bool]
) -> list[tuple[AgentId, PartitionKey]]:
    """Returns the agents and partitions that must still be loaded to activate a placement.

    An excused agent is not waited for, as long as its pool has an agent that is ready or is another
    model's, or its model a chain without such agents.
    """
    lacking = []
    for model, pipeline, stage in stages_of(placement):
        key = partition_of(model, stage)
        need = PartitionRequirement(pipeline.batch_size, model.float16_boundaries)
        late = [agent for agent in stage.agents if not hosts(agent, key, need)]
        enough = len(late) < len(stage.agents)
        enough = enough or pipeline.is_shared
        lacking += [(agent, key) for agent in late if not (enough and excused(agent))]
    for model in placement.models:
        behind = [
            (agent, key) for agent, key, need in hosts_of(model) if not hosts(agent, key, need)
        ]
        waited_for = [(agent, key) for agent, key in behind if not excused(agent)]
        absent = {agent for agent, _ in behind if excused(agent)}
        left, _ = without_agents(model.chains, model.hosts, absent)
        lacking += waited_for if left else behind
    return lacking


Serves = Callable[[AgentId, PartitionKey], bool]
"""Returns True if an agent can serve a partition now."""


def can_serve(pipeline: Pipeline, serves: Serves) -> bool:
    """Returns True if every pool of a pipeline has an agent that the dispatcher may use."""
    return all(
        any(serves(agent, stage.partition) for agent in stage.agents) for stage in pipeline.stages
    )


def can_generate(chain: Chain, serves: Serves) -> bool:
    """Returns True if the dispatcher may use every agent of a chain."""
    return all(serves(hop.agent, hop.partition) for hop in chain.hops)


def empty_pools(plan: ModelPlan, serves: Serves) -> list[str]:
    """Returns in words what the pipelines or chains of a model lack; empty if they lack nothing."""
    pools = [
        f"nobody hosts blocks {stage.partition.first_block} to {stage.partition.last_block}"
        f" (waiting for {', '.join(stage.agents)})"
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if not any(serves(agent, stage.partition) for agent in stage.agents)
    ]
    hops = [hop for chain in plan.chains for hop in chain.hops]
    absent = sorted({hop.agent for hop in hops if not serves(hop.agent, hop.partition)})
    return [*pools, f"no chain is whole (waiting for {', '.join(absent)})"] if absent else pools
