"""Times of the sessions of one run, or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_simulator.chains.loop import SessionLoop
from catenary_simulator.chains.workload import SessionWorkload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChainResult:
    """Times of all served sessions in seconds, and counts of rejected sessions and of events."""

    waits_s: Floats
    services_s: Floats
    rejected: int = 0
    events: int = 0
    decision_ns: Sequence[Nanoseconds] = ()
    """Time of every decision in nanoseconds; empty if they were not timed."""

    @property
    def responses_s(self) -> Floats:
        """Times from arrival to the last token."""
        return self.waits_s + self.services_s

    @property
    def mean_response_s(self) -> float:
        """The mean response time; infinity if any session was rejected, or none was served."""
        if self.rejected or not len(self.waits_s):
            return float("inf")
        return float(self.responses_s.mean())

    def to_json(self) -> dict[str, Any]:
        """Returns the result's figures by name; None for those that need a served session."""
        responses = self.responses_s
        figures: dict[str, Any] = {
            "requests": len(responses) + self.rejected,
            "rejected": self.rejected,
            "mean_response_s": _mean(responses),
            "median_s": _quantile(responses, 50),
            "p95_s": _quantile(responses, 95),
            "p99_s": _quantile(responses, 99),
            "mean_wait_s": _mean(self.waits_s),
            "mean_service_s": _mean(self.services_s),
        }
        for name, values in (("wait", self.waits_s), ("service", self.services_s)):
            figures[f"median_{name}_s"] = _quantile(values, 50)
            figures[f"p95_{name}_s"] = _quantile(values, 95)
            figures[f"max_{name}_s"] = _quantile(values, 100)
        return figures


def result_of(
    workload: SessionWorkload, loop: SessionLoop, decision_ns: Sequence[Nanoseconds] = ()
) -> ChainResult:
    arrived = np.array(workload.arrived_ns, dtype=np.int64)
    started = np.array(loop.started_ns, dtype=np.int64)
    served = started >= 0
    ended = np.array(loop.ended_ns, dtype=np.int64)
    return ChainResult(
        (started - arrived)[served] / NANOSECONDS_PER_SECOND,
        (ended - started)[served] / NANOSECONDS_PER_SECOND,
        loop.rejected,
        loop.told,
        decision_ns,
    )


def together(results: Sequence[ChainResult]) -> ChainResult:
    """Returns the sessions of several runs as the result of one."""
    return ChainResult(
        np.concatenate([each.waits_s for each in results]),
        np.concatenate([each.services_s for each in results]),
        sum(each.rejected for each in results),
        sum(each.events for each in results),
    )


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(values: Floats, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None
