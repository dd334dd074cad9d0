"""What scaling is told: its policy, and the workers there are."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_scheduler.scaling.workers.workers_line import Lengths
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.domain.latency import LatencyLines, TokenObjectives

_S = NANOSECONDS_PER_SECOND
_USUAL = Lengths(256.0, 128.0)


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """When workers come and go."""

    attainment: float = 0.95
    """Share of the sessions that should meet their objectives."""
    theta: float = 0.9
    """Share of an objective, or of the slots, that workers are planned to use."""
    headroom: float = 1.0
    """Standard deviations of the number of sessions there is room for."""
    margin: float = 0.15
    """A worker goes only if the others are enough for so much more than the present load."""
    window_ns: Nanoseconds = 30 * _S
    """Attainment and pace are those of the sessions finished so long ago or less."""
    patience_ns: Nanoseconds = 30 * _S
    """A worker must have been one too many for so long before it goes."""
    cooldown_ns: Nanoseconds = 20 * _S
    """After any change, nothing goes for so long."""
    cold_start_ns: Nanoseconds = 20 * _S
    """From the wish for a worker until it serves, before any was measured."""
    remember_ns: Nanoseconds = 300 * _S
    """A number of workers that failed is not tried again at its rate for so long."""
    queue_ns: Nanoseconds = 2 * _S
    """Sessions may wait for a place for so long before one more worker is wanted."""
    least_finished: int = 8
    """Attainment of fewer sessions says nothing."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What is known of a model's workers at one moment.

    Attributes:
        workers: Chains it is served by.
        sessions: On all of them.
        slots: Most sessions at a time, of all of them.
        queued: Sessions that wait for a place.
        forced: Sessions placed although it breaks an objective (R14), since the term began.
        lines: Of a worker, if known.
        service_ns: Expected time of a session on a worker, as planned.
        objectives: What the model's sessions are held to that name none.
        least: Fewest workers there may be.
        most: Most workers there may be.
        expected: Lengths while too few were seen.
        packed: Workers that the sessions there are need, packed as closely as may be; 0: they are
            not packed.
    """

    workers: int
    sessions: int
    slots: int
    queued: int = 0
    forced: int = 0
    lines: LatencyLines | None = None
    service_ns: Nanoseconds = 0
    objectives: TokenObjectives | None = None
    least: int = 1
    most: int = 1
    expected: Lengths = _USUAL
    packed: int = 0
