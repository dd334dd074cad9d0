"""Plans: which partitions of which models run on which agents, and at what expected times.

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
from catenary_services.domain.model import TokenUnits
from catenary_services.domain.packing import PackingGoal


@dataclass(frozen=True, slots=True)
class Stage:
    """One partition and the pool of agents that host it."""

    partition: PartitionKey
    agents: tuple[AgentId, ...]
    compute_ns: tuple[Nanoseconds, ...]
    """Compute time at batch 1, 2, ..; index 0 is batch 1. The last entry is that of the pipeline's
    batch size or of a larger one."""
    input_bytes: int
    """Bytes of one row, or of one unit, that enter this stage; 0 for the first stage, whose inputs
    are not booked."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A sequence of stages, and the one batch size they are planned for."""

    pipeline_id: str
    batch_size: int
    stages: tuple[Stage, ...]
    is_shared: bool = False
    """True if its pools are those of another model, which has the first use of them."""


@dataclass(frozen=True, slots=True)
class ChainHop:
    """The part of a chain that one agent runs."""

    agent: AgentId
    partition: PartitionKey
    """The partition the agent hosts; it may begin before `first_block`."""
    first_block: int
    last_block: int
    """The end of the partition: blocks `[first_block, last_block)` are processed at this hop."""

    @property
    def blocks(self) -> int:
        """Number of block slots that a session takes at this hop."""
        return self.last_block - self.first_block


ChainRole = Literal["mixed", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Chain:
    """A path through all blocks of a model (GCA, Algorithm 2 of server-chain composition)."""

    chain_id: str
    hops: tuple[ChainHop, ...]
    capacity: int
    """The most concurrent sessions, c_k."""
    service_ns: Nanoseconds
    """Expected time of one session, T_k = 1 / mu_k."""
    role: ChainRole = "mixed"
    """Whether the chain runs prompts, generates, or does both (split phase, Aladdin section 3.4).
    """
    lines: LatencyLines | None = None
    """The chain's latency lines, added up over its hops; None if they are unknown."""
    cache_tokens: float = 0.0
    """Tokens that its caches hold for all sessions together, M; 0 if slots are the only limit."""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """The number of key-value caches an agent keeps for a partition."""

    agent: AgentId
    partition: PartitionKey
    block_slots: int
    cache_tokens: int = 0
    """Tokens that fit into its memory, each counted once per block, where that is less than all
    slots filled; 0 if slots are the only limit."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The part of a plan that serves one model, by pipelines or by chains."""

    model: ModelKey
    slo_ns: Nanoseconds
    """Deadline of a request that names none, from its arrival."""
    pipelines: tuple[Pipeline, ...]
    float16_boundaries: bool = True
    chains: tuple[Chain, ...] = ()
    caches: tuple[CacheCapacity, ...] = ()
    """The caches of every agent on a chain. The chains together ask for no more slots than these.
    """
    session_tokens: int = 0
    """The most tokens of one session, prompt and answer together."""
    objectives: TokenObjectives | None = None
    """Objectives of sessions that name none."""
    packing: PackingGoal = "off"
    """The goal for which sessions are moved between chains while they generate."""
    units: TokenUnits | None = None
    """The units of the pipelines' batch sizes, if the model is given texts; None: rows."""

    @property
    def own_pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines whose pools were made for this model."""
        return tuple([each for each in self.pipelines if not each.is_shared])

    @property
    def shared_pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines through pools of other models."""
        return tuple([each for each in self.pipelines if each.is_shared])

    @property
    def row_units(self) -> int:
        """The units of one row, of a text one of full length; 1 where batches are rows."""
        return 1 if self.units is None else self.units.per_text


@dataclass(frozen=True, slots=True)
class Agent:
    """One device as the planner and the book know it."""

    agent_id: AgentId
    device_class: str
    server: ServerId
    """The machine the agent runs on; agents of one server share its uplink and downlink."""
    memory_bytes: int
    link_bytes_per_second: int
    virtual_level: int = 1
    """The number of virtual GPUs the device is divided into; this agent is one of them."""
    device_id: str = ""
    """The physical device, which its virtual GPUs share; empty for a device of the agent's own."""
    commits_caches_on_use: bool = False
    """True if caches take memory token by token, so that there may be more slots than would fit if
    all of them were full."""
    runtime: str = ""
    """The runtime of its decoders (`Runtime`), which with a model's precision determines the size
    of the model on this agent. If it is empty, the plain sizes of the model's table are used."""
    prefill_chunk_tokens: int = 0
    """The most prompt tokens it computes together with one decode step; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan for a cluster. Immutable; a change is a new plan."""

    plan_id: PlanId
    models: tuple[ModelPlan, ...]
