"""What a simulation found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model. Counted are the requests that arrived from 1 ms to the end of the duration."""

    name: str
    offered_rps: float
    load_factor: float
    """Offered by base rate; of a search, the largest at which enough requests made it."""
    requests: int
    finished: int
    """Answered within the SLO."""
    late: int
    """Computed too late, or still on their way long after the deadline."""
    dropped: int
    """Given up because they could not make it."""
    p50_ms: float | None
    """Of the response times of all that were computed, late ones included."""
    p99_ms: float | None
    mean_batch: float | None

    @property
    def attainment(self) -> float:
        """Share of the requests that were answered within the SLO."""
        return self.finished / self.requests if self.requests else 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the keys of `simulate pools`."""
        return {
            "name": self.name,
            "offered_rps": self.offered_rps,
            "requests": self.requests,
            "finished": self.finished,
            "late": self.late,
            "dropped": self.dropped,
            "attainment": self.attainment,
            "load_factor": self.load_factor,
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "mean_batch": self.mean_batch,
        }


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """One run."""

    models: tuple[ModelResult, ...]
    utilisation: Mapping[str, float]
    """Per GPU class: share of the time of all its GPUs, used or not, that was spent computing."""
    dispatch_us: tuple[float, float] | None
    """p50 and p99 of the CPU time of a full decision; None if it was not measured."""
    events: int
    """Arrivals, ends of transfers and of computes, reports and results delivered, wake-ups."""
    seconds: float
    """CPU time of the event loop: what else the machine does is not counted."""
    counters: Mapping[str, int]
    """The dispatcher's own."""

    @property
    def events_per_second(self) -> float:
        """Speed of the simulation."""
        return self.events / self.seconds if self.seconds > 0 else 0.0

    def model(self, name: str) -> ModelResult:
        """Returns one model's figures."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Returns the object `simulate pools` prints."""
        times = self.dispatch_us
        return {
            "models": [model.to_json() for model in self.models],
            "utilisation": dict(self.utilisation),
            "dispatch_us": {"p50": times[0], "p99": times[1]} if times else None,
            "events": self.events,
            "events_per_second": self.events_per_second,
        }
