"""Plans: which partitions of which models run where, and what that promises.

A *pipeline* is a chain of *stages*; a stage is a contiguous range of blocks hosted by a pool of
agents, any of which can run it. One batch size holds for the whole pipeline (PPipe, section 5).
A model may have several pipelines; agents may appear in several stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.domain.ids import AgentId, ModelKey, Nanoseconds, PartitionKey, PlanId, ServerId


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
class ModelPlan:
    """How one model is served."""

    model: ModelKey
    slo_ns: Nanoseconds
    """Deadline of a request that names none."""
    pipelines: tuple[Pipeline, ...]
    float16_boundaries: bool = True


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


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan for a cluster. Immutable; a change is a new plan."""

    plan_id: PlanId
    models: tuple[ModelPlan, ...]
