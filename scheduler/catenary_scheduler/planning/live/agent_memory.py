"""Memory of agents for a model, and the size that the model has on each of them.

The size of a model depends on its form, and agents hold it in different forms: bfloat16 on one,
float32 on another. Room is therefore counted per agent, for weights, caches and steps alike. Agents
whose runtime cannot load a model have no room for it, and leave theirs to other models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from catenary_scheduler.planning.chain_placement import ChainPlacement
from catenary_scheduler.planning.even_split import DeployedModel
from catenary_services.domain.decoder import AllocatedSizes, LargestStep
from catenary_services.domain.ids import AgentId
from catenary_services.domain.plan import Agent

_ENTRIES = 2
"""Number of entries of a chain that enters in the middle of a partition: its own, and the first
block, which every partition has as one."""


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """Memory that an agent has for a model, and the sizes that the model has there."""

    agent: Agent
    held: AllocatedSizes
    memory: Fraction | None
    """Bytes for blocks and caches: the ends of the model, two entries and a step of the largest
    batch are already subtracted. None if the agent's memory is unknown."""


def memories_of(
    deployed: DeployedModel,
    agents: Sequence[Agent],
    beside: Sequence[DeployedModel],
    taken_bytes: Mapping[AgentId, int],
) -> dict[str, AgentMemory]:
    """Returns the memory that every agent able to load a model has for it, by name of the agent.

    Args:
        deployed: The model.
        agents: The agents that are present.
        beside: All models that share the agents, including this one. They share memory in
            proportion to their weights.
        taken_bytes: Memory that other models take of each agent.
    """
    memories: dict[str, AgentMemory] = {}
    known: dict[str, tuple[AllocatedSizes, Fraction]] = {}
    for agent in sorted(agents, key=lambda each: each.agent_id):
        if deployed.why_not_loaded(agent):
            continue
        if agent.runtime not in known:
            held = deployed.held_by(agent)
            sharing = [each for each in beside if not each.why_not_loaded(agent)]
            whole = sum(whole_bytes(each.held_by(agent)) for each in sharing)
            known[agent.runtime] = held, Fraction(whole_bytes(held), whole)
        held, share = known[agent.runtime]
        memory = None
        if agent.memory_bytes:
            free = agent.memory_bytes - taken_bytes.get(agent.agent_id, 0)
            step = _step(deployed, agent, deployed.max_batch, _ENTRIES)
            kept = held.ends_bytes + _ENTRIES * held.entry_bytes + held.step_bytes(step)
            memory = free * share - kept
        memories[str(agent.agent_id)] = AgentMemory(agent, held, memory)
    return memories


def within_memory(
    deployed: DeployedModel,
    memories: Mapping[str, AgentMemory],
    chains: tuple[ChainPlacement, ...],
) -> tuple[ChainPlacement, ...]:
    """Returns the chains, with fewer sessions where an agent could not run all of them at once.

    On every agent the planner keeps memory free for a step of the model's largest batch and for two
    entries. Several chains through one agent may together need more, and enter at more blocks. In
    that case the last chain, which is the slowest, gives up sessions, all of them if need be. A
    chain that is left alone has the memory that was kept free.
    """
    left = list(chains)
    for at, room in memories.items():
        if room.memory is None:
            continue
        mine = [number for number, chain in enumerate(left) if _passes(chain, at)]
        while len(mine) > 1 and _is_over(deployed, room, [left[number] for number in mine]):
            chain = left[mine[-1]]
            capacity = chain.capacity - 1
            tokens = min(chain.cache_tokens, capacity * deployed.session_tokens)
            left[mine[-1]] = replace(chain, capacity=capacity, cache_tokens=tokens)
            if not capacity:
                mine.pop()
    return tuple(chain for chain in left if chain.capacity)


def _passes(chain: ChainPlacement, agent: str) -> bool:
    return any(hop.agent == agent for hop in chain.hops)


def _is_over(deployed: DeployedModel, room: AgentMemory, chains: Sequence[ChainPlacement]) -> bool:
    """Returns True if the chains take more of an agent's memory than it has for the model."""
    held = room.held
    hops = [(c, hop) for c in chains for hop in c.hops if hop.agent == room.agent.agent_id]
    sessions = sum(chain.capacity for chain, _ in hops)
    entries = len({hop.entry for _, hop in hops} | {hop.first_block for _, hop in hops})
    if room.memory is None or (sessions <= deployed.max_batch and entries <= _ENTRIES):
        return False
    hosted = {hop.host: hop.last_block - hop.first_block for _, hop in hops}
    taken = sum(hosted.values()) * held.largest_block_bytes
    for chain, hop in hops:
        tokens = chain.cache_tokens or chain.capacity * deployed.session_tokens
        taken += held.slot_bytes(tokens * hop.blocks)
    taken += held.step_bytes(_step(deployed, room.agent, sessions, entries))
    taken += entries * held.entry_bytes
    kept = held.step_bytes(_step(deployed, room.agent, deployed.max_batch, _ENTRIES))
    return taken > room.memory + kept + _ENTRIES * held.entry_bytes


def left_out(deployed: DeployedModel, agents: Sequence[Agent]) -> dict[str, list[AgentId]]:
    """Returns the agents that cannot load a model, by the reason in words."""
    found: dict[str, list[AgentId]] = {}
    for agent in sorted(agents, key=lambda each: each.agent_id):
        if why := deployed.why_not_loaded(agent):
            found.setdefault(why, []).append(agent.agent_id)
    return found


def left_out_in_words(
    deployed: DeployedModel, reasons: Mapping[str, Sequence[AgentId]]
) -> list[str]:
    """Returns sentences that say which agents cannot load a model, and why."""
    return [
        f"{deployed.key}: {', '.join(agents)} cannot load it: {why}"
        for why, agents in reasons.items()
    ]


def forms_in_words(
    deployed: DeployedModel, memories: Mapping[str, AgentMemory], agents: set[AgentId]
) -> list[str]:
    """Returns sentences that say in which form the agents hold the model, and its bytes."""
    forms: dict[str, tuple[AllocatedSizes, int]] = {}
    for name, room in memories.items():
        if name in agents:
            _, count = forms.get(str(room.held.form or "imported"), (room.held, 0))
            forms[str(room.held.form or "imported")] = (room.held, count + 1)
    return [
        f"{deployed.key}: as {form} on {count} agent(s): {whole_bytes(held):,} bytes of"
        f" weights, {len(held.block_bytes) * held.cache_bytes_per_token:,} bytes a token."
        for form, (held, count) in sorted(forms.items())
    ]


def whole_bytes(held: AllocatedSizes) -> int:
    """Returns the bytes of a whole model's weights, at least 1."""
    return max(1, held.weight_bytes(0, len(held.block_bytes)))


def _step(deployed: DeployedModel, agent: Agent, sessions: int, entries: int) -> LargestStep:
    chunk = agent.prefill_chunk_tokens
    return LargestStep(sessions, chunk, deployed.session_tokens, entries)
