"""The metrics of generation. Labels are resolved once per model, not at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary_services.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

    from catenary_agent.generation.state.events import LoopOutput
    from catenary_agent.generation.state.partition_batcher import StepDone

_NS = 1e-9


class GenerationMeter:
    """Counts steps, rows, sessions and their moves."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        """Counts into `metrics`; without them, into counters that nobody reads."""
        self._metrics = metrics or Metrics()
        self._models: dict[str, tuple[Histogram, Counter, Counter]] = {}

    def frame_refused(self) -> None:
        """Counts a frame whose sender has no part in its sessions."""
        self._metrics.frames_refused.labels("unplanned_sender").inc()

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

    def flowed_out(self, out: LoopOutput) -> None:
        """Counts the output of the generation loop."""
        metrics = self._metrics
        self.steps(out.steps)
        for model, guesses, right in out.guesses:
            metrics.generation_guesses.labels(model, "right").inc(right)
            metrics.generation_guesses.labels(model, "wrong").inc(guesses - right)
        for model, asked, reused in out.asked:
            metrics.generation_prompt_tokens.labels(model, "computed").inc(asked - reused)
            metrics.generation_prompt_tokens.labels(model, "reused").inc(reused)
        for model, duration_ns in out.handed_over:
            metrics.handover_seconds.labels(model).observe(duration_ns * _NS)
        for cache in out.caches:
            model = cache.session.batcher.key.model.name
            metrics.cache_bytes.labels(model, "frames").inc(cache.rows.nbytes)
        for piece in out.passed:
            metrics.cache_bytes.labels(piece.model, piece.way).inc(piece.nbytes)
        for way in out.loans_failed:
            metrics.cache_loans_failed.labels(way).inc()
        for model, outcome in out.outcomes:
            metrics.generation_sessions_ended.labels(model, outcome).inc()
        for done in out.moved:
            metrics.session_moves.labels(done.model, done.mode).inc()
        for model, reason in out.moves_failed:
            metrics.session_moves_failed.labels(model, reason).inc()
        for model, mode, duration_ns in out.taken_over:
            metrics.session_takeover_seconds.labels(model, mode).observe(duration_ns * _NS)
