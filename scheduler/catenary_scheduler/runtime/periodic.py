"""Runs the periodic tasks of a leader: heartbeats, silence, deadlines of waiting requests.

Every part has a `tick`, an `export` or both; the loop that calls them is here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import Nanoseconds
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
_TURN_S = 0.05
_SAY_AGAIN_S = 60.0


class Ticking(Protocol):
    """A part with work that becomes due as time passes."""

    def tick(self, now: Nanoseconds) -> None:
        """Does the work that is due at `now`."""
        ...


class Exporting(Protocol):
    """A part that shows metrics."""

    def export(self, metrics: Metrics) -> None:
        """Sets the metrics of this part."""
        ...


@dataclass(frozen=True, slots=True)
class PeriodicTasks:
    """Parts that are called again and again, in the order given.

    Attributes:
        period_s: Seconds between two calls; 0: every turn of the loop, 50 ms.
        ticking: Parts whose `tick` is called.
        exporting: Parts whose `export` is called after that.
    """

    period_s: float
    ticking: tuple[Ticking, ...] = ()
    exporting: tuple[Exporting, ...] = ()


async def run_periodic_tasks(schedule: Sequence[PeriodicTasks], metrics: Metrics) -> None:
    """Calls the parts of a schedule until cancelled."""
    due_s = [0.0] * len(schedule)
    calls = _Calls()
    while True:
        now_s = time.monotonic()
        for number, each in enumerate(schedule):
            if now_s < due_s[number]:
                continue
            due_s[number] = now_s + each.period_s
            for part in each.ticking:
                calls.tick(part)
            for shown in each.exporting:
                calls.export(shown, metrics)
        await asyncio.sleep(_TURN_S)


class _Calls:
    """Calls parts one by one; a failure of one, whatever its cause, does not stop the others."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}
        """Monotonic seconds at which each kind of failure was last logged."""

    def tick(self, part: Ticking) -> None:
        try:
            part.tick(now_ns())
        except Exception as error:
            self._failed(part.tick, error)

    def export(self, part: Exporting, metrics: Metrics) -> None:
        try:
            part.export(metrics)
        except Exception as error:
            self._failed(part.export, error)

    def _failed(self, call: Callable[..., None], error: Exception) -> None:
        """Logs a failure; one that repeats is logged once a minute."""
        kind, now_s = f"{call.__qualname__}: {error!r}"[:200], time.monotonic()
        if now_s - self._said_s.get(kind, -math.inf) >= _SAY_AGAIN_S:
            self._said_s = {k: s for k, s in self._said_s.items() if now_s - s < _SAY_AGAIN_S}
            self._said_s[kind] = now_s
            _log.error("periodic_task_failed", task=call.__qualname__, exc_info=error)


def show_nothing(metrics: Metrics) -> None:
    """Resets the metrics that only a leader sets, so that sums over all schedulers are right."""
    for gauge in (
        metrics.redis_pending,
        metrics.batches_in_flight,
        metrics.live_reservations,
        metrics.gateways,
        metrics.sessions_moving,
        metrics.sessions_misplaced,
        metrics.stragglers,
        metrics.fragile_models,
        metrics.packed_chains,
        metrics.packed_chains_in_use,
        metrics.agents_wanted,
        metrics.agents_now,
    ):
        gauge.set(0)
    for labelled in (
        metrics.agents,
        metrics.impaired_agents,
        metrics.agent_slowdown,
        metrics.queued_requests,
        metrics.link_rate,
        metrics.link_utilisation,
        metrics.server_link_rate,
        metrics.server_link_round_trip,
    ):
        labelled.clear()
    metrics.keep_chains(set())
    metrics.keep_scaled(set())
