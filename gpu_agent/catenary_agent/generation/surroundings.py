"""What the generation engine is told when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from catenary_agent.generation.meter import GenerationMeter
from catenary_agent.supervision.steps import StepsInHand

if TYPE_CHECKING:
    from catenary_agent.engine.emulated_link import EmulatedLink
    from catenary_agent.engine.inbound.memory import Held
    from catenary_agent.engine.outbound import Hub
    from catenary_agent.engine.reporting import Outgoing
    from catenary_services.telemetry.tracing import Tracer


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """How caches travel from agent to agent."""

    frame_bytes: int = 1 << 20
    """Most bytes of one frame; a copy of one is what the event loop is kept from others for."""
    window_bytes: int = 64 << 20
    """Copies of cache rows that wait for one peer; more stay in their slots until these left."""
    step_bytes: int = 32 << 20
    """Copied out of the caches between two steps, or into them, beside what the step itself has
    cached: what a long session's caches hold the others up, some 15 ms on a CPU."""
    patience_ns: int = 30_000_000_000
    """A session whose caches are awaited is given up if for so long none came."""
    last_round_tokens: int = 2
    """A session that moves is handed over if no more was added during a round of sending."""
    last_read_tokens: int = 4
    """The same where tokens are read again."""


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """How much a step takes, how long peers are waited for, how much waits for them."""

    chunk_tokens: int = 64
    push_timeout_s: float = 2.0
    max_waiting_bytes: int = 256 << 20
    """Hidden states in the line to one peer."""
    caches: CacheLimits = CacheLimits()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What generation shares with the rest of the agent."""

    hub: Hub
    tell: Callable[[Outgoing], None]
    """Takes messages for the scheduler; neither blocks nor raises."""
    held: Held
    """Counts bytes of received tensors."""
    meter: GenerationMeter
    tracer: Tracer | None = None
    uplink: EmulatedLink | None = None
    steps: StepsInHand = field(default_factory=StepsInHand)
    """What is computed now."""
