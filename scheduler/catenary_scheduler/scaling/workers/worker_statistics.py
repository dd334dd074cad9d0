"""Policy and statistics from which scaling decides."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_scheduler.scaling.workers.workers_line import SessionLengths
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.domain.latency import LatencyLines, TokenObjectives

_S = NANOSECONDS_PER_SECOND
_USUAL = SessionLengths(256.0, 128.0)


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Thresholds and times that determine when workers come and go."""

    attainment: float = 0.95
    """Share of sessions that should meet their objectives."""
    theta: float = 0.9
    """Share of an objective, or of the slots, that workers are planned to use."""
    headroom: float = 1.0
    """Room for random peaks, in standard deviations of the number of sessions."""
    margin: float = 0.15
    """Share by which the load may grow without the worker that goes: the others must suffice for
    that."""
    window_ns: Nanoseconds = 30 * _S
    """Window of the finished sessions whose attainment and pace count, in nanoseconds."""
    scale_down_window_ns: Nanoseconds = 30 * _S
    """Time for which a worker must have been one too many before it goes, in nanoseconds."""
    cooldown_ns: Nanoseconds = 20 * _S
    """Time after any change in which no worker goes, in nanoseconds."""
    cold_start_ns: Nanoseconds = 20 * _S
    """Time from the order of a worker until it serves, in nanoseconds, before any was measured."""
    remember_ns: Nanoseconds = 300 * _S
    """Time for which a number of workers that failed is not tried again at its rate, in
    nanoseconds."""
    queue_ns: Nanoseconds = 2 * _S
    """Time for which sessions may wait for a place before one more worker is wanted, in
    nanoseconds."""
    least_finished: int = 8
    """Least number of finished sessions whose attainment says anything."""


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """State of a model's workers at one moment.

    Attributes:
        workers: Number of chains that serve the model.
        sessions: Number of sessions on all chains together.
        slots: Largest number of sessions at a time, on all chains together.
        queued: Number of sessions that wait for a place.
        forced: Number of sessions that were placed although that breaks an objective (R14), since
            the scheduler's term began.
        lines: Latency lines of a worker; None if they are unknown.
        service_ns: Expected nanoseconds of a session on a worker, as planned.
        objectives: Objectives of the model's sessions that name none of their own.
        least: Fewest workers there may be.
        most: Most workers there may be.
        expected: Lengths to assume while too few were seen.
        packed: Number of workers that the present sessions need if packed as closely as possible; 0
            if sessions are not packed.
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
    expected: SessionLengths = _USUAL
    packed: int = 0
