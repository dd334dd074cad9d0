"""Figures of a placement run: attainment of objectives, times and use of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, Nanoseconds
from catenary_simulator.placement.engine import PICOSECONDS
from catenary_simulator.placement.loop import PlacementLoop

Floats = npt.NDArray[np.float64]
_PS_PER_MS = NANOSECONDS_PER_MILLISECOND * PICOSECONDS


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """Figures of one placement run.

    Attributes:
        requests: Number of requests of the workload.
        attained: Number of requests that met both objectives; rejected requests and those that
            never ended did not.
        rejected: Number of requests answered with an error.
        first_token_ms: Time to the first token (TTFT) of each request that ended.
        per_token_ms: Mean time per token (ATGT) of each request that ended with two tokens or more.
        first_token_late: Number of requests that ended and missed TTFT.
        per_token_late: Number of requests that ended and missed ATGT.
        workers: Number of workers in the run.
        workers_peak: Most workers with a session at the same time.
        workers_mean: Mean number of workers with a session until the last arrival.
        utilisation: Share of the workers' time until the last arrival in which they computed.
        preemptions: Number of times that a session's cache was taken away.
        events: Number of events that the dispatcher handled.
        simulated_s: Virtual seconds until the end of the run.
        decided: Whether the run was ended early because too many requests had missed.
        decision_ns: Time of every decision; empty if they were not timed.
        statistics: Counters of the dispatcher.
        busiest: Time that the busiest worker computed, over the mean of all.
        shared_tokens: Tokens of prompts that requests before had in their texts, in whole blocks.
        reused_tokens: Tokens of prompts that were not computed, because a worker had cached them.
    """

    requests: int
    attained: int
    rejected: int
    first_token_ms: Floats
    per_token_ms: Floats
    first_token_late: int
    per_token_late: int
    workers: int
    workers_peak: int
    workers_mean: float
    utilisation: float
    preemptions: int
    events: int
    simulated_s: float
    decided: bool = False
    decision_ns: Sequence[Nanoseconds] = ()
    statistics: Mapping[str, int] = field(default_factory=dict)
    busiest: float = 1.0
    shared_tokens: int = 0
    reused_tokens: int = 0

    @property
    def attainment(self) -> float:
        """Share of the requests that met their objectives; 1 if there were none."""
        return self.attained / self.requests if self.requests else 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the figures by name; None for times of which there are none."""
        return {
            "workers": self.workers,
            "attainment": self.attainment,
            "requests": self.requests,
            "rejected": self.rejected,
            "ttft_late": self.first_token_late,
            "atgt_late": self.per_token_late,
            "ttft_p50_ms": _quantile(self.first_token_ms, 50),
            "ttft_p99_ms": _quantile(self.first_token_ms, 99),
            "atgt_p50_ms": _quantile(self.per_token_ms, 50),
            "atgt_p99_ms": _quantile(self.per_token_ms, 99),
            "workers_peak": self.workers_peak,
            "workers_mean": self.workers_mean,
            "utilisation": self.utilisation,
            "preemptions": self.preemptions,
        }


def result_of(
    loop: PlacementLoop,
    decision_ns: Sequence[Nanoseconds] = (),
    statistics: Mapping[str, int] | None = None,
) -> PlacementResult:
    over, limits = loop.ended, loop.objectives
    first = np.array([each.first_ps - each.arrived_ps for each in over], dtype=np.float64)
    longer = [each for each in over if each.answer_tokens > 1]
    per_token = np.array(
        [(each.last_ps - each.first_ps) / (each.answer_tokens - 1) for each in longer],
        dtype=np.float64,
    )
    ttft, atgt = first / _PS_PER_MS, per_token / _PS_PER_MS
    workers = list(loop.workers.values())
    arriving = max(1, loop.arriving_ps)
    return PlacementResult(
        requests=loop.requests,
        attained=sum(loop.attained(each) for each in over),
        rejected=len(loop.rejected),
        first_token_ms=ttft,
        per_token_ms=atgt,
        first_token_late=_late(ttft, limits.first_token_ns),
        per_token_late=_late(atgt, limits.per_token_ns),
        workers=len(workers),
        workers_peak=loop.peak_used,
        workers_mean=loop.arriving_area / arriving,
        utilisation=loop.busy_ps / (arriving * max(1, len(workers))),
        busiest=_busiest([worker.busy_ps for worker in workers]),
        shared_tokens=loop.shared_tokens,
        reused_tokens=sum(each.reused for each in over if not each.preemptions),
        preemptions=sum(worker.preemptions for worker in workers),
        events=loop.told,
        simulated_s=loop.now / (1000 * _PS_PER_MS),
        decided=loop.decided,
        decision_ns=decision_ns,
        statistics=statistics or {},
    )


def _busiest(busy_ps: Sequence[int]) -> float:
    """Returns the time of the busiest worker over the mean of all; 1 if none was busy."""
    whole = sum(busy_ps)
    return max(busy_ps) * len(busy_ps) / whole if whole else 1.0


def _late(values_ms: Floats, limit_ns: Nanoseconds) -> int:
    limit_ms = limit_ns / NANOSECONDS_PER_MILLISECOND
    return int(np.count_nonzero(values_ms > limit_ms)) if limit_ns else 0


def _quantile(values: Floats, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None
