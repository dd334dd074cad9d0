"""What generation counts for the metrics page. Labels are resolved once, not per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

    from gpu_agent.generation.events import StepDone

_NS = 1e-9


class GenerationMeter:
    """Counts steps, rows and sessions."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        """Counts into `metrics`, or for nobody."""
        self._metrics = metrics or Metrics()
        self._models: dict[str, tuple[Histogram, Counter, Counter]] = {}

    def steps(self, done: Sequence[StepDone]) -> None:
        """Counts steps that were computed."""
        for step in done:
            resolved = self._models.get(step.model)
            if resolved is None:
                rows = self._metrics.generation_rows
                resolved = (
                    self._metrics.generation_step_seconds.labels(step.model),
                    rows.labels(step.model, "decode"),
                    rows.labels(step.model, "prefill"),
                )
                self._models[step.model] = resolved
            seconds = step.duration_ns * _NS
            resolved[0].observe(seconds)
            resolved[1].inc(step.decode_rows)
            resolved[2].inc(step.prefill_tokens)
            self._metrics.device_busy_seconds.inc(seconds)

    def cache_left(self, model: str, nbytes: int) -> None:
        """Counts a part of a cache that another agent is sent."""
        self._metrics.cache_bytes.labels(model).inc(nbytes)

    def handed_over(self, model: str, duration_ns: int) -> None:
        """Counts a session that came from another ring."""
        self._metrics.handover_seconds.labels(model).observe(duration_ns * _NS)

    def ended(self, model: str, outcome: str, count: int = 1) -> None:
        """Counts sessions that ended here: closed, or failed with a reason."""
        self._metrics.generation_sessions_ended.labels(model, outcome).inc(count)
