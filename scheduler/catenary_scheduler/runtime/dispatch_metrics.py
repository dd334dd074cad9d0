"""Exports the counters of the dispatcher as metrics.

The dispatcher counts in plain integers, which are read here at every heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping

from catenary_scheduler.dispatch import CombinedDispatcher
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
_PLACEMENTS = {
    "placed": "placed_requests",
    "forced": "forced_placements",
    "inadmissible": "inadmissible_requests",
    "rebalanced": "rebalanced_sessions",
    "preempted": "preempted_sessions",
}
"""Counter of the dispatcher for each label of the metric."""
_WINDOWS = ("granted", "extended", "revoked", "expired", "unused")
_PACKING = {
    "begun": "packing_moves",
    "full": "packing_full",
    "harmful": "packing_harmful",
    "worthless": "packing_worthless",
    "deferred": "packing_deferred",
}
_MIGRATIONS = {"kv": "kv_moves", "tokens": "tokens_moves"}
_MIGRATION_FAILURES = {
    reason: f"failed_moves_{reason}" for reason in ("deadline", "agent", "lost", "closed", "over")
}


class DispatchMetrics:
    """Exports the counters of one dispatcher, each time by what was added since the last time."""

    def __init__(self, dispatcher: CombinedDispatcher) -> None:
        self._dispatcher = dispatcher
        self._told: dict[str, int] = {}

    def export(self, metrics: Metrics) -> None:
        """Adds what was counted since the last call to the metrics, and sets the gauges."""
        metrics.live_reservations.set(len(self._dispatcher.snapshot()))
        now = self._dispatcher.statistics()
        _add(now, self._told, metrics)
        wrong = now.get("illegal_transitions", 0) - self._told.get("illegal_transitions", 0)
        if wrong:  # a bug, after which requests go on all the same
            _log.error("illegal_transitions", count=wrong)
        self._told = now


def _add(now: Mapping[str, int], told: Mapping[str, int], metrics: Metrics) -> None:
    """Adds the difference between two readings of the dispatcher's counters to the metrics."""

    def since(name: str) -> int:
        return now.get(name, 0) - told.get(name, 0)

    metrics.reservation_drift.inc(since("drift_ns_sum") / NANOSECONDS_PER_SECOND)
    metrics.reservation_corrections.inc(since("corrections"))
    metrics.reservation_conflicts.inc(since("displaced_batches"))
    metrics.circuits_opened.inc(since("opened_circuits"))
    metrics.poison_requests.inc(since("failed_requests"))
    metrics.sessions_stalled.inc(since("stalled_sessions"))
    metrics.window_batches.inc(since("window_batches"))
    for outcome in _WINDOWS:
        metrics.dispatch_windows.labels(outcome).inc(since(f"{outcome}_windows"))
    for outcome, name in _PLACEMENTS.items():
        metrics.placements.labels(outcome).inc(since(name))
    for outcome, name in _PACKING.items():
        metrics.packing_moves.labels(outcome).inc(since(name))
    metrics.packed_chains.set(now.get("packed_chains", 0))
    metrics.packed_chains_in_use.set(now.get("packed_chains_in_use", 0))
    for mode, name in _MIGRATIONS.items():
        metrics.migrations.labels(mode).inc(since(name))
    for reason, name in _MIGRATION_FAILURES.items():
        metrics.migration_failures.labels(reason).inc(since(name))
    metrics.sessions_moving.set(now.get("moving_sessions", 0))
    metrics.sessions_misplaced.set(now.get("misplaced_sessions", 0))
    if "theta_millionths" in now:
        metrics.placement_theta.set(now["theta_millionths"] / 1e6)
