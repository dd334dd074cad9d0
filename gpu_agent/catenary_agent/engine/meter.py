"""The metrics of the batch engine. Labels are resolved once per model, not for every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_services.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

    from catenary_agent.engine.batch import Batch

_NS = 1e-9


class BatchMeter:
    """Counts batches, their phases, and frames."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        """Counts into `metrics`; without them, into counters that nobody reads."""
        self._metrics = metrics or Metrics()
        self._models: dict[str, tuple[Counter, Histogram, Histogram, Histogram]] = {}
        self._transports: dict[str, tuple[Counter, Counter]] = {}

    def received(self, transport: str, nbytes: int) -> None:
        """Counts a frame that arrived."""
        counters = self._transports.get(transport)
        if counters is None:
            counters = (
                self._metrics.frames.labels(transport, "received"),
                self._metrics.frame_bytes.labels(transport, "received"),
            )
            self._transports[transport] = counters
        counters[0].inc()
        counters[1].inc(nbytes)

    def frame_refused(self) -> None:
        """Counts a frame whose sender is not the one that its route names."""
        self._metrics.frames_refused.labels("unplanned_sender").inc()

    def delivered(self, batch: Batch, sent_ns: int) -> None:
        """Counts a batch whose outputs have left, and the durations of its phases."""
        model = batch.partition.key.model.name
        resolved = self._models.get(model)
        if resolved is None:
            phases = self._metrics.stage_seconds
            resolved = (
                self._metrics.batches.labels(model, "OK"),
                phases.labels(model, "wait"),
                phases.labels(model, "compute"),
                phases.labels(model, "send"),
            )
            self._models[model] = resolved
        done, wait, compute, send = resolved
        compute_s = (batch.ended_ns - batch.started_ns) * _NS
        done.inc()
        wait.observe((batch.started_ns - batch.received_ns) * _NS)
        compute.observe(compute_s)
        send.observe((sent_ns - batch.ended_ns) * _NS)
        self._metrics.device_busy_seconds.inc(compute_s)

    def failed(self, model: str, reason: str) -> None:
        """Counts a batch that ended without a result."""
        self._metrics.batches.labels(model, reason).inc()
