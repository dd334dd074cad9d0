"""Arrival rates of models, as exponentially weighted averages."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from catenary_scheduler.dispatch.events import Event, RequestArrived, WindowReported
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds


@dataclass(slots=True)
class _Count:
    rows: float
    """Number of rows, decayed to the moment `at_ns`."""
    at_ns: Nanoseconds


class ArrivalRates:
    """Rows per second of every model, with weights that fall to 1/e in one time constant.

    Short texts count as parts of a row: plans are made for texts of full length.
    """

    observes = (RequestArrived, WindowReported)

    def __init__(self, time_constant_ns: Nanoseconds) -> None:
        self._time_constant_ns = time_constant_ns
        self._counts: dict[ModelKey, _Count] = {}
        self._since_ns: Nanoseconds | None = None

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Counts the rows of a request, or of all that went by a window."""
        assert isinstance(event, RequestArrived | WindowReported)
        if isinstance(event, WindowReported) and not event.rows:
            return
        self.arrived(event.model, event.full_rows, now)

    def arrived(self, model: ModelKey, rows: float, now: Nanoseconds) -> None:
        if self._since_ns is None:
            self._since_ns = now
        count = self._counts.get(model)
        if count is None:
            self._counts[model] = _Count(rows, now)
            return
        count.rows = count.rows * self._decay(now - count.at_ns) + rows
        count.at_ns = now

    def observed_rows(self, model: ModelKey, now: Nanoseconds) -> float:
        """Returns how many rows the rate of a model rests on, with old rows weighted less."""
        count = self._counts.get(model)
        return 0.0 if count is None else count.rows * self._decay(now - count.at_ns)

    def rate(self, model: ModelKey, now: Nanoseconds) -> float:
        """Returns the rows per second of a model; 0 if none arrived yet.

        Soon after the first arrival the weights do not add up to one yet, so the rate is divided by
        their sum.
        """
        if self._since_ns is None:
            return 0.0
        weight = 1.0 - self._decay(now - self._since_ns)
        if weight <= 0.0:
            return 0.0
        seconds = self._time_constant_ns / NANOSECONDS_PER_SECOND
        return self.observed_rows(model, now) / (seconds * weight)

    def _decay(self, elapsed_ns: Nanoseconds) -> float:
        return exp(-max(0, elapsed_ns) / self._time_constant_ns)
