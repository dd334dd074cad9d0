"""The results of a simulation run, by model and in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelResult:
    """Figures of one model.

    They count the requests that arrived between 1 ms and the end of the duration.
    """

    name: str
    offered_rps: float
    load_factor: float
    """Offered rate by base rate. In a search it is the largest at which enough requests were in
    time."""
    requests: int
    finished: int
    """Number of requests answered within the SLO."""
    late: int
    """Number of requests computed too late, or still on their way long after the deadline."""
    dropped: int
    """Number of requests given up because they could not be in time."""
    p50_ms: float | None
    """Median response time of all computed requests, late ones included; None if there were
    none."""
    p99_ms: float | None
    mean_batch: float | None

    @property
    def attainment(self) -> float:
        """Share of the requests that were answered within the SLO; 1 if there were none."""
        return self.finished / self.requests if self.requests else 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the model's entry in the output of `simulate pools`."""
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
    """Results of one run."""

    models: tuple[ModelResult, ...]
    utilisation: Mapping[str, float]
    """Share of the time of all GPUs of a class, used or not, that was spent computing; by class."""
    dispatch_us: tuple[float, float] | None
    """Median and 99th percentile of a full decision's CPU time; None if it was not measured."""
    events: int
    """Number of events: arrivals, ends of transfers and computations, delivered reports,
    wake-ups."""
    seconds: float
    """CPU time of the event loop's thread, which other work on the machine does not change."""
    counters: Mapping[str, int]
    """Counters of the dispatcher."""

    @property
    def events_per_second(self) -> float:
        """Events per second of CPU time; 0 if no time was measured."""
        return self.events / self.seconds if self.seconds > 0 else 0.0

    def model(self, name: str) -> ModelResult:
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
