"""The arrival of requests: their times, traces and ids, and when each is answered at the latest."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

from catenary_gateway.inference import ConversionContext, RequestArrival
from catenary_services.telemetry.tracing import Tracer

_EVERY_S = 0.1
_KEPT_LOOKS = 50
"""Number of measurements of one interval; the worst of the present and the last interval counts."""
_ANSWER_MARGIN_S = 0.05
_ANSWER_MARGIN_SHARE = 0.01
"""Part of a client's waiting time by which it is answered earlier. A client that waits long loses
nothing by it, and a machine may become busy meanwhile."""
_ANSWER_MARGIN_LAGS = 3.0
"""Number of event-loop lags by which a client is answered earlier: for the timer that ends its
request, for the answer's way out, and one in reserve."""
_LONGEST_ID = 256


class RequestArrivals:
    """Notes when requests come in, and gives ids to those that have none."""

    def __init__(self, gateway_id: str, tracer: Tracer, max_request_bytes: int) -> None:
        self.lag = LoopLag()
        self._tracer = tracer
        self._max_request_bytes = max_request_bytes
        self._prefix = f"{gateway_id}-{random.getrandbits(32):08x}-"
        self._numbers = itertools.count(1)

    def arrive(
        self, method: str, traceparent: str | None, budget_s: float | None = None
    ) -> RequestArrival:
        """Returns the arrival of a request that came in just now.

        `budget_s` are the seconds left of its call's deadline; None if it has none.
        """
        trace, parent_span_id = self._tracer.root(traceparent)
        budget_ns = None if budget_s is None else answer_within_ns(budget_s, self.lag.worst_s)
        return RequestArrival(
            method, time.monotonic_ns(), time.time_ns(), trace, parent_span_id, budget_ns
        )

    def conversion(self, default_id: str | None = None) -> ConversionContext:
        """Returns the arguments of a converter for a request that arrives now.

        `default_id` is the id of a request without one; None for a new id.
        """
        made = default_id[:_LONGEST_ID] if default_id else self.new_id()
        return ConversionContext(self._max_request_bytes, time.time_ns(), made)

    def new_id(self) -> str:
        """Returns a new id for a request that has none."""
        return f"{self._prefix}{next(self._numbers)}"


class LoopLag:
    """A timer that measures how late it is called, from `start` to `stop`.

    Answers may be late by as much.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self._worst_s = self._worst_before_s = 0.0

    @property
    def worst_s(self) -> float:
        """The most seconds by which a timer was late in the last five to ten seconds."""
        return max(self._worst_s, self._worst_before_s)

    def start(self) -> None:
        """Starts the next measurement, on the running event loop."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + _EVERY_S
        self._timer = loop.call_at(due_s, self._look, loop, due_s)

    def stop(self) -> None:
        """Cancels the measurement under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.note(loop.time() - due_s)
        self.start()

    def note(self, late_s: float) -> None:
        """Records that a timer was `late_s` seconds late."""
        self._looks += 1
        if self._looks >= _KEPT_LOOKS:
            self._worst_before_s, self._worst_s, self._looks = self._worst_s, 0.0, 0
        self._worst_s = max(self._worst_s, late_s)


def answer_within_ns(left_s: float, lag_s: float) -> int:
    """Returns within how many nanoseconds to answer a client that waits `left_s` seconds more.

    It is a little less than `left_s`, so that the client gets the reason of a failure before its
    own deadline ends the call. The margin grows with the lag of this gateway's timers, `lag_s`.
    """
    wanted_s = max(_ANSWER_MARGIN_S, _ANSWER_MARGIN_SHARE * left_s, _ANSWER_MARGIN_LAGS * lag_s)
    left_s = min(left_s, 1e6)
    return max(0, int((left_s - min(wanted_s, left_s / 10)) * 1e9))
