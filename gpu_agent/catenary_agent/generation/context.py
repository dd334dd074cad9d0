"""The limits and collaborators that the generation engine is constructed with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from catenary_agent.generation.frames.link_pace import FIRST_FRAME_BYTES
from catenary_agent.generation.meter import GenerationMeter
from catenary_agent.supervision.steps import RunningSteps

if TYPE_CHECKING:
    from catenary_agent.engine.emulated_link import EmulatedLink
    from catenary_agent.engine.inbound.memory import HeldBatches
    from catenary_agent.engine.outbound import LinkHub
    from catenary_agent.engine.reporting import OutgoingMessage
    from catenary_services.domain.ids import Nanoseconds
    from catenary_services.telemetry.tracing import Tracer


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits on sending and receiving key-value caches, and the timeouts of live migrations."""

    frame_bytes: int = 1 << 20
    """The most bytes of one frame. The event loop is blocked while one frame is copied."""
    export_bytes: int = 8 << 20
    """The most bytes of frames that are copied out of caches at a time, unless one frame has more.
    Every copy waits for the device, some 0.1 ms on a GPU, in which that could copy 5 MB."""
    window_bytes: int = 64 << 20
    """The most bytes copied from caches that wait for one peer; further rows stay in their slots.
    What was copied at a time is freed when the last frame of it has left."""
    step_bytes: int = 32 << 20
    """The bytes copied out of caches, or into them, between two steps, in addition to what the step
    itself cached. This is how long one long session delays the others: some 15 ms on a CPU."""
    lent_bytes: int = 32 << 20
    """Size of the memory that is lent to an agent of this host, of which up to eight have some."""
    least_lent_bytes: int = 1 << 18
    """Smaller parts leave as frames, which come there in one way instead of there and back."""
    stall_timeout_ns: int = 30_000_000_000
    """A session that waits for caches is given up if none came for this long."""
    link_bytes: Mapping[str, int] | None = None
    """See `GenerationLimits.link_bytes`."""
    last_round_tokens: int = 2
    """A moving session is handed over when a round of sending added no more tokens than this."""
    last_read_tokens: int = 4
    """The same limit where the new ring reads the tokens again instead of receiving caches."""

    def frame_bytes_to(self, peer: str) -> int:
        """Returns the most bytes of one frame for a peer."""
        if self.link_bytes is None:
            return self.frame_bytes
        bound = self.link_bytes.get(peer, FIRST_FRAME_BYTES)
        return min(bound, self.frame_bytes) if bound else self.frame_bytes


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """Limits of one step, of the time a peer may take, and of the bytes that wait for it."""

    chunk_tokens: int = 64
    draft_tokens: int = 8
    """The most guessed tokens of a session in one step."""
    prompt_pause_ns: Nanoseconds = 0
    """The most that prompt tokens may take of a step with decode rows, over all blocks of the
    model; 0: only `chunk_tokens` limits them."""
    keeps_prefixes: bool = True
    """Whether caches are kept for sessions that begin like one before."""
    prefix_host_bytes: int = 0
    """The most bytes of host memory for them, of partitions whose caches have memory of their own
    on a device. Those of others take what the caches of sessions leave over."""
    link_bytes: Mapping[str, int] | None = None
    """The most bytes of a frame that others may overtake, by peer, and 0 for any number (see
    `PeerSender`); None if no link bounds them."""
    narrows_rows: bool = False
    """Whether hidden states travel to other machines as bfloat16."""
    push_timeout_s: float = 2.0
    max_waiting_bytes: int = 256 << 20
    """The most bytes of frames in one line to a peer (see `PeerSender`)."""
    caches: CacheLimits = CacheLimits()


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """The parts of the agent that generation shares with the rest of it."""

    hub: LinkHub
    tell: Callable[[OutgoingMessage], None]
    """Takes messages for the scheduler; neither blocks nor raises."""
    held: HeldBatches
    """The counter of the bytes of received tensors, shared with the batch engine."""
    meter: GenerationMeter
    tracer: Tracer | None = None
    uplink: EmulatedLink | None = None
    steps: RunningSteps = field(default_factory=RunningSteps)
    """The steps that are being computed, for the watchdog."""
    is_local: Callable[[str], bool] = lambda agent_id: False
    """Returns True if another agent is on this host, as far as is known; any thread may ask."""
    validates: bool = False
    """Whether the generation loop checks all its invariants after every event and step."""
