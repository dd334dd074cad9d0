"""Plans: which partitions of which models run where, and what that promises.

A *pipeline* is a chain of *stages*; a stage is a contiguous range of blocks hosted by a pool of
agents, any of which can run it. One batch size holds for the whole pipeline (PPipe, section 5).
A model may have several pipelines; agents may appear in several stages.

A model that generates text has *chains* instead: every session runs through one chain, again and
again, and keeps its key-value cache on the agents of it. Chains share agents by *block slots*: one
slot is the cache of one session in one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from catenary_services.domain.ids import (
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    PlanId,
    ServerId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.packing import PackingGoal


@dataclass(frozen=True, slots=True)
class Stage:
    """One partition and the pool of agents that host it."""

    partition: PartitionKey
    agents: tuple[AgentId, ...]
    compute_ns: tuple[Nanoseconds, ...]
    """Compute time at batch 1, 2, ..; index 0 is batch 1. Covers the pipeline's batch size."""
    input_bytes: int
    """Bytes of one row that enter this stage (0 for the first stage: inputs are not booked)."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and the one batch size they are planned for."""

    pipeline_id: str
    batch_size: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class ChainHop:
    """What one agent does for the sessions of a chain."""

    agent: AgentId
    partition: PartitionKey
    """What the agent hosts."""
    first_block: int
    last_block: int
    """Blocks `[first_block, last_block)` are really processed here; the end of the partition."""

    @property
    def blocks(self) -> int:
        """Block slots a session takes here."""
        return self.last_block - self.first_block


ChainRole = Literal["mixed", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Chain:
    """A path through all blocks of a model (GCA, Algorithm 2 of server-chain composition)."""

    chain_id: str
    hops: tuple[ChainHop, ...]
    capacity: int
    """Sessions at a time, c_k."""
    service_ns: Nanoseconds
    """Expected time of one session, T_k = 1 / mu_k."""
    role: ChainRole = "mixed"
    """Whether it runs prompts, generates, or both (split phase, Aladdin section 3.4)."""
    lines: LatencyLines | None = None
    """Its latency lines, added up over its hops; None if nothing is known of them."""
    cache_tokens: float = 0.0
    """Tokens its caches hold, M, of all sessions together; 0: slots are the only limit."""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """How many key-value caches an agent keeps for a partition."""

    agent: AgentId
    partition: PartitionKey
    block_slots: int
    cache_tokens: int = 0
    """What its memory holds, if less than every slot filled: tokens, each counted once per block;
    0: slots are the only limit."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """How one model is served: by pipelines, or by chains."""

    model: ModelKey
    slo_ns: Nanoseconds
    """Deadline of a request that names none."""
    pipelines: tuple[Pipeline, ...]
    float16_boundaries: bool = True
    chains: tuple[Chain, ...] = ()
    caches: tuple[CacheCapacity, ...] = ()
    """Of every agent on a chain. Together the chains may ask for no more."""
    session_tokens: int = 0
    """Most tokens of one session, prompt and answer together."""
    objectives: TokenObjectives | None = None
    """Of sessions that name none."""
    packing: PackingGoal = "off"
    """What its sessions are moved for while they generate."""


@dataclass(frozen=True, slots=True)
class Agent:
    """What the planner and the book know of one device."""

    agent_id: AgentId
    device_class: str
    server: ServerId
    """Agents of one server share its uplink and downlink."""
    memory_bytes: int
    link_bytes_per_second: int
    virtual_level: int = 1
    """This agent is one of so many virtual GPUs of its device."""
    device_id: str = ""
    """Physical device; the virtual GPUs of one share it. Empty: a device of its own."""
    commits_caches_on_use: bool = False
    """Caches take memory token by token, so there may be more slots than would fit if all were
    full."""
    runtime: str = ""
    """What it runs decoders with (`DecoderRuntime`): with a model's precision that says how large
    the model is there. Empty: nobody knows; the plain sizes of the model's table stand for it."""
    prefill_chunk_tokens: int = 0
    """Most prompt tokens it computes beside one step; 0: not known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan for a cluster. Immutable; a change is a new plan."""

    plan_id: PlanId
    models: tuple[ModelPlan, ...]
